// SPDX-License-Identifier: Apache-2.0
// The formats e2m1, e4m3 and e8m0, exact reciprocals and quotients, and Philox, for all kernels here.
//
// No header is included, so that NVRTC needs none. Compiled with --fmad=false: a product and a sum
// round one after the other unless fma says otherwise, as in the torch reference
// (numerics/nvfp4.py), whose bits these kernels reproduce.
#pragma once

// Q2_HW_FP4: the fp4 conversions of Blackwell. Q2_HW_FP8: the fp8 conversions that began with sm_89;
// without fp4 ones these do part of their work. 0: the same results by arithmetic.
#if !defined(Q2_HW_FP4) || !defined(Q2_HW_FP8) || Q2_HW_FP4 > Q2_HW_FP8
#error "define Q2_HW_FP4 and Q2_HW_FP8 as 0 or 1; fp4 conversions come with those of fp8"
#endif

#include "ptx.cuh"

// 2^n, which ptxas does not know: multiply-adds have a pipe with more room than shifts and sums have.
__constant__ u32 power_of_two[13] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};

// 0, which ptxas does not know: what is added times this waits for it. It would make many Philox blocks
// at once, and spill registers.
__constant__ u32 zero = 0;

Q2_INLINE Pair from_bf16x2(u32 word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}

// Eight e2m1 codes to four words of two f16, each value times 2^-14. Word i holds codes i and i +
// 4, which lie 16 bits apart, so that one product and mask serves both. e2m1 is sign, two exponent
// bits, one mantissa bit: its low three bits go to the lowest exponent bits and the highest
// mantissa bit of the f16, whose subnormals stand for e2m1's.
Q2_INLINE void e2m1x8_to_f16x2(u32 codes, u32 (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 top = i == 3 ? codes : codes * power_of_two[12 - 4 * i];
    u32 low = i == 3 ? codes >> 3 : codes * power_of_two[9 - 4 * i];
    words[i] = (top & 0x80008000u) | (low & 0x0E000E00u);
  }
}

#if !Q2_HW_FP8
// The conversions of ptx.cuh by arithmetic. An f16 whose bits 7 to 13 are the seven low bits of an e4m3
// has its value times 2^-8, also for subnormals. 0x7F is NaN.
Q2_INLINE u32 e4m3x2_to_f16x2(u32 bytes) {
  u32 apart = (bytes & 0xFFu) | (bytes & 0xFF00u) << 8, low = apart & 0x007F007Fu;
  u32 nan = (low + 0x00010001u) >> 7 & 0x00010001u;
  return (apart & 0x00800080u) << 8 | mul_f16x2(low << 7, 0x5C005C00u) | nan * 0x7FFFu;
}

// To the nearest, ties to even. From 2^-6 on the upper bits of an fp32 count e4m3's steps; below, the
// sum with 2^14, whose last bit weighs 2^-9, does.
Q2_INLINE u32 to_e4m3_by_arithmetic(float x) {
  u32 sign = __float_as_uint(x) >> 24 & 0x80u;
  float magnitude = fminf(fabsf(x), 448.0f);
  u32 bits = __float_as_uint(magnitude);
  u32 normal = ((bits + 0x7FFFFu + (bits >> 20 & 1)) >> 20) - (120u << 3);
  u32 subnormal = __float_as_uint(magnitude + 0x1p14f) - __float_as_uint(0x1p14f);
  return x == x ? sign | (magnitude < 0x1p-6f ? subnormal : normal) : 0x7F;
}
Q2_INLINE u32 to_e4m3x4(float x0, float x1, float x2, float x3) {
  return to_e4m3_by_arithmetic(x0) | to_e4m3_by_arithmetic(x1) << 8 |
         to_e4m3_by_arithmetic(x2) << 16 | to_e4m3_by_arithmetic(x3) << 24;
}
#endif

Q2_INLINE float from_e4m3(u32 byte) {
  return from_f16x2(e4m3x2_to_f16x2(byte)).a;
}

// Non-negative, to the nearest, saturating.
Q2_INLINE u32 to_e4m3(float x) {
  return to_e4m3x4(x, 0.0f, 0.0f, 0.0f) & 0xFF;
}

// An e8m0 byte: 2^(byte - 127), 255 is NaN.
Q2_INLINE float from_e8m0(u32 byte) {
  return __uint_as_float(byte == 255 ? 0x7FC00000u : byte == 0 ? 0x00400000u : byte << 23);
}

// Dequantizes eight codes: (e2m1 * scale) * global_scale.
Q2_INLINE void dequantized(u32 codes, float scale, float global_scale, float (&x)[8]) {
  u32 words[4];
  e2m1x8_to_f16x2(codes, words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Pair two =
        from_f16x2(mul_f16x2(words[i], 0x74007400u));  // times 2^14: the e2m1 values themselves
    x[i] = two.a * scale * global_scale;
    x[i + 4] = two.b * scale * global_scale;
  }
}

// x >= 0 rounded to 4 significant bits, ties to even.
Q2_INLINE float keep_4_bits(float x) {
  u32 bits = __float_as_uint(x);
  return __uint_as_float((bits + 0x7FFFFu + ((bits >> 20) & 1)) & 0xFFF00000u);
}

// x >= 0, normal, to the 4 significant bits below or above it: up when random_bits < fraction * 2^32,
// of which the fraction's 20 bits and the first 20 random bits decide. ~random_bits, added, then
// carries.
Q2_INLINE float stochastic_4_bits(float x, u32 random_bits) {
  return __uint_as_float((__float_as_uint(x) + 0xFFFFFu - (random_bits >> 12)) & 0xFFF00000u);
}

// The scale that is used until its global scale is known: 1 if code * scale could be too small for
// bf16. NaN stays.
Q2_INLINE float provisional(float scale) {
  return scale < 0x1p-100f ? 1.0f : scale;
}

// 1 / x to the nearest, for x with 4 significant bits within [2^-126, 2^126]: the quotient is then
// far from every tie, and one Newton step on the hardware's approximation, whose residual is exact,
// ends on it.
Q2_INLINE float reciprocal(float x) {
  float r = approximate_reciprocal(x);
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

// a / b to the nearest where neither a, b nor the quotient is near the ends of the range: __fdiv_rn
// without its test and slow path.
Q2_INLINE float divide(float a, float b) {
  float r = reciprocal(b);
  float q = a * r;
  q = __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
  return __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
}

// Reciprocals and quotients of two numbers at once, for which sm_100 has instructions. They are negative
// so that every difference is a product and a sum. If b is 0, the result may be anything.
Q2_INLINE Pair negative_reciprocals(Pair x) {
  Pair r = {approximate_reciprocal(-x.a), approximate_reciprocal(-x.b)};
  return fma(fma(x, r, both(1.0f)), r, r);
}
Q2_INLINE Pair negative_quotients(Pair a, Pair b) {
  Pair r = negative_reciprocals(b);
  Pair q = mul(a, r);
  q = fma(fma(b, q, a), r, q);
  return fma(fma(b, q, a), r, q);
}

// Where scale (row, block) lies in the layout of Blackwell's tensor cores, `across` tiles of 4 blocks
// wide (numerics/swizzle.py). The four of a tile's row are one word.
Q2_INLINE long long swizzled_at(u32 row, u32 block, u32 across) {
  long long tile = (long long)(row / 128) * across + block / 4;
  return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
}

// The pair of the lane whose number differs in the bits of mask.
Q2_INLINE Pair from_lane(Pair x, int mask) {
  return {__shfl_xor_sync(~0u, x.a, mask), __shfl_xor_sync(~0u, x.b, mask)};
}

// The largest `value` of a thread block.
template <int kThreads>
Q2_INLINE u32 block_largest(u32 value) {
  __shared__ u32 of_warp[kThreads / 32];
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) value = max(value, of_warp[i]);
  __syncthreads();
  return value;
}

// Philox4x32 (numerics/philox.py): key = the seed, counter = (index, rng_offset, purpose).

enum Purpose { SIGNS = 1, RANDOM_BITS = 2 };  // of 10 and of 7 rounds

// Blocks first, first + 1, ... for one rng_offset: their rounds share a key schedule.
template <int n, typename Index>
Q2_INLINE void philox(u64 seed, Index first, u32 rng_offset, Purpose purpose, uint4 (&c)[n]) {
  // For one block the product in C++ compiles to a sum with 0; for two, mul_wide takes registers.
  auto product = [](u32 x, u32 y) { return n == 1 ? mul_wide(x, y) : (u64)x * y; };
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    u64 index = first + (Index)i;
    c[i] = {(u32)index, (u32)(index >> 32), rng_offset, (u32)purpose};
  }
#pragma unroll
  for (int round = 0; round < (purpose == SIGNS ? 10 : 7); ++round) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      u64 product0 = product(c[i].x, 0xD2511F53u), product1 = product(c[i].z, 0xCD9E8D57u);
      c[i] = {(u32)(product1 >> 32) ^ c[i].y ^ k0, (u32)product1,
              (u32)(product0 >> 32) ^ c[i].w ^ k1, (u32)product0};
    }
    k0 = k0 * power_of_two[0] + 0x9E3779B9u;
    k1 = k1 * power_of_two[0] + 0xBB67AE85u;
  }
}

// Word i of consecutive blocks.
template <int n>
Q2_INLINE u32 word_of(const uint4 (&blocks)[n], int i) {
  const uint4& block = blocks[i / 4];
  return i % 4 < 2 ? (i % 4 ? block.y : block.x) : (i % 4 == 2 ? block.z : block.w);
}
