// SPDX-License-Identifier: Apache-2.0
// Dequantizes matrices: (e2m1(code) * scale) * global_scale, rounded once.
//
//   codes         u8 [M, Kp/2], even element in the low nibble
//   scales        e4m3 [ceil(M / 2^row_shift), Kp/16] (row_shift 4: blocks of 16x16), or
//                 e8m0 [ceil(M / 2^row_shift), Kp/32] (5: of 32x32)
//   global_scale  fp32, or null for 1
//   out           [M, cols], cols <= Kp: bf16, f16 or fp32
//
// code * scale is exact (6 significant bits); with a power of two as global scale so is all of it
// in bf16. A thread takes 8 codes, one 4-byte load, and writes 8 elements. Bytes per element: .5625
// read, 2 (fp32: 4) written. A launch serves up to kMaxMatrices matrices, one after the other.

#include "formats.cuh"

enum Out { BF16, F16, F32 };
constexpr int kOut = Q2_OUT;
constexpr bool kMx = Q2_MX;  // e8m0 scales of blocks of 32
constexpr bool kWhole =
    Q2_WHOLE;  // cols == Kp, and rows do not share scales: everything is one flat array
constexpr int kThreads = 256;
constexpr int kOutBytes = kOut == F32 ? 4 : 2;

constexpr int kMaxMatrices = 4;

struct Matrix {
  const u32* codes;
  const u8* scales;
  const float* global_scale;
  u8* out;
  long long groups;  // of 8 codes
  int groups_across, cols, row_shift;
  int blocks;  // thread blocks
};
struct Params {
  Matrix matrices[kMaxMatrices];
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in other_ops.py");

Q2_INLINE float decode_scale(u32 byte) {
  return kMx ? from_e8m0(byte) : from_e4m3(byte);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    dequantize(const __grid_constant__ Params params) {
  int block = blockIdx.x, number = 0;
#pragma unroll
  for (int i = 0; i + 1 < kMaxMatrices; ++i)
    if (number == i && block >= params.matrices[i].blocks)
      block -= params.matrices[i].blocks, ++number;
  const Matrix& p = params.matrices[number];
  long long group = block * (long long)kThreads + threadIdx.x;
  if (group >= p.groups) return;
  constexpr int kPerScale = kMx ? 4 : 2;
  long long scale_at = group / kPerScale, out_at = group * 8;
  int left = 8;
  if constexpr (!kWhole) {
    long long row = group / p.groups_across;
    int across = (int)(group - row * p.groups_across);
    scale_at = (row >> p.row_shift) * (p.groups_across / kPerScale) + across / kPerScale;
    out_at = row * p.cols + across * 8;
    left = p.cols - across * 8;
  }
  float scale = decode_scale(p.scales[scale_at]);
  float global_scale = p.global_scale ? *p.global_scale : 1.0f;
  float x[8];
  dequantized(p.codes[group], scale, global_scale, x);
  u8* out = p.out + out_at * kOutBytes;
  if constexpr (kWhole) {
    if constexpr (kOut == F32) {
      ((float4*)out)[0] = {x[0], x[1], x[2], x[3]};
      ((float4*)out)[1] = {x[4], x[5], x[6], x[7]};
    } else {
      auto narrow = [](float a, float b) {
        return kOut == BF16 ? to_bf16x2(a, b) : to_f16x2(a, b);
      };
      *(uint4*)out = {narrow(x[0], x[1]), narrow(x[2], x[3]), narrow(x[4], x[5]),
                      narrow(x[6], x[7])};
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i >= left) break;
      if constexpr (kOut == F32) ((float*)out)[i] = x[i];
      else ((u16*)out)[i] = (u16)(kOut == BF16 ? to_bf16x2(x[i], 0.0f) : to_f16x2(x[i], 0.0f));
    }
  }
}
