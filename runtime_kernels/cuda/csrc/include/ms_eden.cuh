// MS-EDEN on blocks of 16 in registers: the arithmetic of numerics/nvfp4.py:_ms_eden, to
// the bit.
#pragma once
#include "e2m1.cuh"

// 1 / s_clip and s_clip = 6 * (16/17) / 0.93, as the reference rounds it (schemes.py,
// MS_EDEN_CLIP).
#define Q2_INVERSE_CLIP 0x1.5147aep-3f

// Sum of 16 in the reference's order, neighbours first.
template <int n, typename Term>
Q2_INLINE Pair block_sum(Term term, int first = 0) {
  if constexpr (n == 1) {
    return term(first);
  } else {
    return add(block_sum<n / 2>(term, first), block_sum<n / 2>(term, first + n / 2));
  }
}

// Two blocks of 16, one in each half of the pairs; x becomes what its codes stand for, in kUnit.
// codes[h]: eight bytes of half h. Returns p * S of each: what a code is worth, before the split
// into block and global scale.
Q2_INLINE Pair ms_eden(Pair (&x)[16], u32 (&codes)[2][2]) {
  Pair largest = {fabsf(x[0].a), fabsf(x[0].b)};
#pragma unroll
  for (int i = 1; i < 16; ++i)
    largest = {fmaxf(largest.a, fabsf(x[i].a)), fmaxf(largest.b, fabsf(x[i].b))};
  Pair pseudo = {keep_4_bits(largest.a * Q2_INVERSE_CLIP),
                 keep_4_bits(largest.b * Q2_INVERSE_CLIP)};
  // Blocks with a subnormal pseudo-scale count as zeros. NaN fails the test too: it comes back with
  // the sums.
  bool live_a = pseudo.a >= 0x1p-126f, live_b = pseudo.b >= 0x1p-126f;
  pseudo = {live_a ? pseudo.a : 0.0f, live_b ? pseudo.b : 0.0f};
  Pair inverse = {live_a ? reciprocal(pseudo.a) : 1.0f, live_b ? reciprocal(pseudo.b) : 1.0f};

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
  Pair projection = block_sum<16>([&](int i) { return mul(scaled[i], rounded[i]); });
  Pair square = block_sum<16>([&](int i) { return mul(scaled[i], scaled[i]); });
  with_signs(rounded, x);
  return {pseudo.a * (projection.a == 0.0f ? 1.0f : divide(square.a, projection.a)),
          pseudo.b * (projection.b == 0.0f ? 1.0f : divide(square.b, projection.b))};
}
