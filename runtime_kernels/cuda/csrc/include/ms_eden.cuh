// SPDX-License-Identifier: Apache-2.0
// MS-EDEN on blocks of 16 in registers: the arithmetic of numerics/nvfp4.py:_ms_eden, to
// the bit.
#pragma once
#include "e2m1.cuh"
#include "tile.cuh"

// 1 / s_clip and s_clip = 6 * (16/17) / 0.93, as the reference rounds it (schemes.py,
// MS_EDEN_CLIP).
#define Q2_INVERSE_CLIP 0x1.5147aep-3f

// Sums of 16 products of what is in kUnit, none negative, each cut to a multiple of 2^-13 in units of
// 1: as the last bit of a sum in [1024, 2048) is, so that their order does not matter. Two at a time,
// since each waits for the one before it.
Q2_INLINE Pair sum_of_products(const Pair (&x)[16], const Pair (&y)[16]) {
  constexpr float kStart = 1024.0f * kUnit * kUnit;
  Pair sums[2] = {both(kStart), both(kStart)};
#pragma unroll
  for (int i = 0; i < 16; ++i) sums[i % 2] = fma_toward_zero(x[i], y[i], sums[i % 2]);
  return add(add(sums[0], both(-2 * kStart)), sums[1]);
}

// Two blocks of 16; x becomes what its codes stand for, in kUnit.
// codes[h]: eight bytes of half h. Returns p * S of each: the raw scale, before the split
// into block and global scale; NaN of a block that is not finite, whose sums are NaN.
Q2_INLINE Pair ms_eden(Pair (&x)[16], u32 (&codes)[2][2]) {
  Pair largest = {fabsf(x[0].a), fabsf(x[0].b)};
#pragma unroll
  for (int i = 1; i < 16; ++i)
    largest = {fmaxf(largest.a, fabsf(x[i].a)), fmaxf(largest.b, fabsf(x[i].b))};
  Pair pseudo = mul(largest, both(Q2_INVERSE_CLIP));
  pseudo = {keep_4_bits(pseudo.a), keep_4_bits(pseudo.b)};
  // Blocks with a subnormal pseudo-scale count as zeros: what is multiplied by 1 rounds to 0, and its
  // squares are cut to 0, below. NaN, which may be alone in its block, counts as one of them and comes
  // back with the sums, and Inf, whose reciprocal is NaN, with it.
  Pair inverse = negative_reciprocals({pseudo.a >= 0x1p-126f ? -pseudo.a : -1.0f,
                                       pseudo.b >= 0x1p-126f ? -pseudo.b : -1.0f});

  Pair scaled[16], rounded[16];
#if Q2_HW_FP4
#pragma unroll
  for (int i = 0; i < 16; ++i) scaled[i] = mul(x[i], inverse);
#else
  // The sums below only meet in a quotient, so the factor 2^-6 of both operands changes none of its
  // bits.
  inverse = mul(inverse, both(0x1p-6f));
#pragma unroll
  for (int i = 0; i < 16; ++i) scaled[i] = {fabsf(x[i].a) * inverse.a, fabsf(x[i].b) * inverse.b};
#endif
  round_block(scaled, x, rounded, codes);
  Pair projection = sum_of_products(scaled, rounded), square = sum_of_products(scaled, scaled);
  with_signs(rounded, x);
  // Where a block does not count as zeros its largest element becomes 6, so that the projection is above
  // 1. Else it is 0, and the square as well.
  constexpr float kLeast = kUnit * kUnit;
  Pair quotient = negative_quotients(
      square, {fminf(-projection.a, -kLeast), fminf(-projection.b, -kLeast)});
  return mul(pseudo, quotient);
}
