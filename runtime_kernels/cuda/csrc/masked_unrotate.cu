// SPDX-License-Identifier: Apache-2.0
// The backward of QuEST's quantizer: the gradient where its rounding did not clip, rotated back in
// chunks of 32 (H without signs, which is its own inverse).
//
//   grad  [M, Kp], Kp in whole chunks: bf16, f16 or fp32
//   mask  one bit per element, the least significant bit first: u32 [M, Kp/32]
//   out   as grad
//
// A thread has one chunk in registers. Order of operations: transforms.py:hadamard, then the norm;
// fp32, rounded once. Bytes an element: 2.125 read, 2 written (fp32: 4.125, 4).

#include "formats.cuh"

enum Type { BF16, F16, F32 };
constexpr int kType = Q2_TYPE;
constexpr int kThreads = 256;
constexpr int kChunk = 32;
constexpr int kPieces = kType == F32 ? 8 : 4;  // of 16 bytes
constexpr int kPerPiece = kChunk / kPieces;

struct Params {
  const uint4* grad;
  const u32* mask;
  uint4* out;
  long long chunks;
  float norm;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in other_ops.py");

Q2_INLINE Pair dequantized(u32 word) {
  return kType == BF16 ? from_bf16x2(word) : from_f16x2(word);
}
Q2_INLINE u32 narrowed(const float* x) {
  return kType == BF16 ? to_bf16x2(x[0], x[1]) : to_f16x2(x[0], x[1]);
}

Q2_INLINE void load_piece(uint4 piece, float* x) {
  u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kType == F32) {
      x[i] = __uint_as_float(words[i]);
    } else {
      Pair two = dequantized(words[i]);
      x[2 * i] = two.a, x[2 * i + 1] = two.b;
    }
  }
}

Q2_INLINE uint4 stored_piece(const float* x) {
  if constexpr (kType == F32)
    return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
            __float_as_uint(x[3])};
  else return {narrowed(x), narrowed(x + 2), narrowed(x + 4), narrowed(x + 6)};
}

extern "C" __global__ void __launch_bounds__(kThreads)
    masked_unrotate(const __grid_constant__ Params p) {
  long long chunk = blockIdx.x * (long long)kThreads + threadIdx.x;
  if (chunk >= p.chunks) return;
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kPieces; ++i) load_piece(p.grad[chunk * kPieces + i], x + i * kPerPiece);
  u32 trusted = p.mask[chunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = trusted >> i & 1 ? x[i] : 0.0f;
#pragma unroll
  for (int h = 1; h < kChunk; h *= 2) {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      if (i & h) continue;
      float a = x[i], b = x[i + h];
      x[i] = a + b, x[i + h] = a - b;
    }
  }
#pragma unroll
  for (float& v : x) v *= p.norm;
#pragma unroll
  for (int i = 0; i < kPieces; ++i) p.out[chunk * kPieces + i] = stored_piece(x + i * kPerPiece);
}
