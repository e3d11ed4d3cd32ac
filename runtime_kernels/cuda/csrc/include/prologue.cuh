// SPDX-License-Identifier: Apache-2.0
// Building blocks of a prologue expression, which computes the operand in the quantizer. The expression
// itself is prologue_expression.cuh, generated for each variant (cuda/quantize/prologue_source.py).
// For tile.cuh with Q2_PROLOGUE.
//
// Rounding is that of Inductor's Triton code: fp32 and the functions of libdevice. But quotients,
// exponentials and 1 + erf are approximated to some ulp, and a product and a sum are never one
// instruction (--fmad=false), which Inductor leaves to ptxas unless emulate_precision_casts is set.
#pragma once
#include "formats.cuh"

constexpr int kPerPiece = 16 / kBytes;  // elements of 16 bytes of the operand

// The elements of a piece that are loaded from one input: kPerPiece of them if it is read along a row,
// one if it is uniform within a piece.
template <int words>
struct Words {
  u32 at[words];
};

template <int size>
Q2_INLINE Words<kPerPiece * size / 4> load_piece(const void* input, long long index,
                                                 bool there = true) {
  constexpr int n = kPerPiece * size / 4;
  Words<n> loaded = {};
  if (!there) return loaded;
  const u8* from = (const u8*)input + index * size;
  if constexpr (n >= 4) {
#pragma unroll
    for (int i = 0; i < n; i += 4) {
      uint4 v = __ldg((const uint4*)from + i / 4);
      loaded.at[i] = v.x, loaded.at[i + 1] = v.y, loaded.at[i + 2] = v.z, loaded.at[i + 3] = v.w;
    }
  } else if constexpr (n == 2) {
    uint2 v = __ldg((const uint2*)from);
    loaded.at[0] = v.x, loaded.at[1] = v.y;
  } else {
    loaded.at[0] = __ldg((const u32*)from);
  }
  return loaded;
}

template <int size>
Q2_INLINE Words<1> load_one(const void* input, long long index, bool there = true) {
  if (!there) return {};
  if constexpr (size == 4) return {__ldg((const u32*)input + index)};
  else if constexpr (size == 2) return {__ldg((const u16*)input + index)};
  else return {__ldg((const u8*)input + index)};
}

template <int n>
Q2_INLINE float bf16_of(const Words<n>& words, int j) {
  u32 word = words.at[j / 2];
  return __uint_as_float(j % 2 ? word & 0xFFFF0000u : word << 16);
}
template <int n>
Q2_INLINE float f16_of(const Words<n>& words, int j) {
  Pair two = from_f16x2(words.at[j / 2]);
  return j % 2 ? two.b : two.a;
}
template <int n>
Q2_INLINE float f32_of(const Words<n>& words, int j) {
  return __uint_as_float(words.at[j]);
}
template <int n>
Q2_INLINE u32 byte_of(const Words<n>& words, int j) {
  return words.at[j / 4] >> 8 * (j % 4) & 0xFF;
}

Q2_INLINE float round_to_bfloat16(float x) {
  return __uint_as_float(to_bf16x2(x, 0.0f) << 16);
}
Q2_INLINE float round_to_float16(float x) {
  return from_f16x2(to_f16x2(x, 0.0f)).a;
}

// The product's rounding makes it |x| 2^-24 of itself wrong; subnormals are 0.
Q2_INLINE float approximate_exp(float x) {
  return approximate_exp2(x * 0x1.715476p+0f);  // log2(e)
}

// 1 + e^-x is at least 1, so the reciprocal needs no care of subnormals but where the sigmoid is one.
Q2_INLINE float sigmoid(float x) {
  return approximate_reciprocal(1.0f + approximate_exp(-x));
}

// 1 + erf(x), as GELU has it: erfc(|x|) = 2^(|x| p(|x|)), or 2 less that. Against libdevice's erf,
// whose coefficients depend on |x|, half as many instructions. p: least largest error of erfc, which
// is 2^-24; of the sum with the exponential's 2^-22.
Q2_INLINE float erf_plus_one(float x) {
  constexpr float kP[8] = {-0x1.7c7edcp-15f, 0x1.d32612p-12f,  -0x1.8672c2p-10f, -0x1.9620f6p-11f,
                           0x1.cee886p-6f,   -0x1.301720p-3f, -0x1.d63aacp-1f,  -0x1.a0be9ep+0f};
  float t = fabsf(x), p = kP[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) p = __fmaf_rn(p, t, kP[i]);
  float e = approximate_exp2(p * t);
  return x < 0.0f ? e : 2.0f - e;
}

// Division of integers that are not negative.
template <typename Index>
Q2_INLINE Index floordiv(Index a, long long b) {
  return a / (Index)b;
}
template <typename Index>
Q2_INLINE Index mod(Index a, long long b) {
  return a % (Index)b;
}

// The computed piece, rounded to the operand's type.
Q2_INLINE uint4 piece_of(const float (&made)[kPerPiece]) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kSource == BF16) words[i] = to_bf16x2(made[2 * i], made[2 * i + 1]);
    else if constexpr (kSource == F16) words[i] = to_f16x2(made[2 * i], made[2 * i + 1]);
    else words[i] = __float_as_uint(made[i]);
  }
  return {words[0], words[1], words[2], words[3]};
}

#include "prologue_expression.cuh"
