// SPDX-License-Identifier: Apache-2.0
// Global scale and rounded block scales from raw scales: what align_scales.cu and
// finalize_dequantized.cu share. Their headers say what the defines mean.
#pragma once
#include "formats.cuh"
#if Q2_SUMS
#include "sums.cuh"
#endif

constexpr int kThreads = 256;
constexpr int kMaxOperands = 4;

// A rowwise or columnwise operand. A batched launch serves several (blockIdx.y).
struct Operand {
  const float* raw_scale;
  const u32* largest;
  const u64* seed;
  u8* scales;  // finalize_dequantized.cu: the dequantized elements
  float* global_scale;
  const float* source_global;  // or null: factor of MS-EDEN's raw scales
  const float* other;          // or null: global scale of the other operand of the GEMM
  float* product;              // or null: for the product of both global scales
  long long count;
  u32 rng_offset;
  int parts;
  float norm;
  int blocks;   // in a row
  int partner;  // the operand of this launch whose global scale replaces `other`; or less than 0
};

struct Params {
  Operand operands[kMaxOperands];
#if Q2_SUMS
  Sums sums[kMaxSums];
  int sum_count;  // of them; their thread blocks come before those of the operands
#endif
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in align_scales.py");

// The sums of columns are added up by thread blocks of their own. Returns true in these, when they are done.
Q2_INLINE bool adds_up([[maybe_unused]] const Params& p) {
#if Q2_SUMS
  if (blockIdx.y >= p.sum_count) return false;
  await_previous_kernel();
  add_up<kThreads>(p.sums[blockIdx.y]);
  return true;
#else
  return false;
#endif
}

// The operand of a thread block.
Q2_INLINE const Operand& operand_of(const Params& p) {
#if Q2_SUMS
  return p.operands[blockIdx.y - p.sum_count];
#else
  return p.operands[blockIdx.y];
#endif
}

// The largest of `count` values, each exclusive or flip.
Q2_INLINE u32 largest_of(const u32* values, int count, u32 flip = 0) {
  u32 value = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) value = max(value, values[i] ^ flip);
  return block_largest<kThreads>(value);
}

Q2_INLINE float factor_of(const Operand& operand) {
  return operand.norm * (operand.source_global ? *operand.source_global : 1.0f);
}

// Called by all threads of a thread block. factor: factor_of(operand).
Q2_INLINE float global_scale_of(const Operand& operand, float factor) {
#if Q2_MX
  return operand.norm;
#else
  float largest = __uint_as_float(largest_of(operand.largest, operand.parts)) * factor;
  if (!(largest <= 3.402823466e38f)) return __uint_as_float(0x7FC00000u);
#if Q2_POW2
  // cap = 2^8, or 1.75 * 2^8. Subnormals get the floor of 2^-126.
  constexpr u32 kCapMantissa = Q2_STOCHASTIC ? 0 : 0x600000;
  if (largest == 0.0f) return 1.0f;
  u32 bits = __float_as_uint(largest);
  int exponent = (int)(bits >> 23) - 8 + ((bits & 0x7FFFFFu) > kCapMantissa);
  return __uint_as_float((u32)max(exponent, 1) << 23);
#else
  return largest == 0.0f ? 1.0f : fmaxf(largest * 0x1p-8f, 0x1p-126f);
#endif
#endif
}

// SR to e4m3 of x in [0, 448]. The grid around x has the step 2^(max(exponent, -6) - 3); x goes up
// when random_bits < fraction of a step * 2^32. From 2^-6 on the upper bits of an fp32 count steps.
Q2_INLINE u32 stochastic_normal(float x, u32 random_bits) {
  u32 bits = __float_as_uint(x);
  return (bits >> 20) - (120u << 3) + (random_bits < bits << 12);
}
Q2_INLINE u32 stochastic_subnormal(float x, u32 random_bits) {
  float steps = x * 0x1p9f;
  u32 below = (u32)steps;
  return below + (random_bits < (u32)((steps - (float)below) * 0x1p32f));
}

// Either, and NaN.
Q2_INLINE u32 stochastic_e4m3(float x, u32 random_bits) {
  if (x >= 0x1p-6f) return stochastic_normal(x, random_bits);
  return x == x ? stochastic_subnormal(x, random_bits) : 0x7F;
}

// Two elements, code * made, become code * finalized * g. The quotient of the two scales is rounded, but
// what a code times it is close to has 6 bits, and comes out of the rounding to bf16.
Q2_INLINE u32 rescaled(u32 word, float quotient, u32 two_global_scales) {
  Pair v = from_bf16x2(word);
  return mul_bf16x2(to_bf16x2(v.a * quotient, v.b * quotient), two_global_scales);
}

// Eight elements, code * made, become code * finalized * g.
Q2_INLINE void rescale(uint4* eight, float made, float finalized, float global_scale) {
  float quotient = __fdiv_rn(finalized, made);
  u32 two = to_bf16x2(global_scale, global_scale);
  uint4 v = *eight;
  *eight = {rescaled(v.x, quotient, two), rescaled(v.y, quotient, two),
              rescaled(v.z, quotient, two), rescaled(v.w, quotient, two)};
}
