// MS-EDEN on blocks of 16 in registers: the arithmetic of runtime_kernels/blocks.py:_ms_eden, to
// the bit.
#pragma once
#include "numbers.cuh"

// 1 / s_clip and s_clip = 6 * (16/17) / 0.93, as the reference rounds it (schemes.py,
// MS_EDEN_CLIP).
#define Q2_INVERSE_CLIP 0x1.5147aep-3f

// x >= 0 rounded to 4 significant bits, ties to even.
Q2_INLINE float keep_4_bits(float x) {
  u32 bits = __float_as_uint(x);
  return __uint_as_float((bits + 0x7FFFFu + ((bits >> 20) & 1)) & 0xFFF00000u);
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

// Sum of 16 in the reference's order, neighbours first.
template <int n, typename Term>
Q2_INLINE Pair block_sum(Term term, int first = 0) {
  if constexpr (n == 1) {
    return term(first);
  } else {
    return add(block_sum<n / 2>(term, first), block_sum<n / 2>(term, first + n / 2));
  }
}

#if Q2_HW_FP4
// Eight floats to eight codes, and back to floats.
Q2_INLINE u32 round_eight(const float (&x)[8], float (&rounded)[8]) {
  u32 codes = to_e2m1x8(x), words[4];
  from_e2m1x8(codes, words);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Pair two = from_f16x2(words[i]);
    rounded[2 * i] = two.a;
    rounded[2 * i + 1] = two.b;
  }
  return codes;
}

// Rounds 16 pairs to e2m1: codes, and the rounded values in units of the input's.
Q2_INLINE void round_block(const Pair (&scaled)[16], const Pair (&)[16], Pair (&rounded)[16],
                           u32 (&codes)[2][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x[8], d[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = scaled[8 * half + i].a;
    codes[0][half] = round_eight(x, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) rounded[8 * half + i].a = d[i], x[i] = scaled[8 * half + i].b;
    codes[1][half] = round_eight(x, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) rounded[8 * half + i].b = d[i];
  }
}
#else
// Eight magnitudes on the e2m1 grid times 2^-6, and the floats whose signs they get, to eight
// codes. A byte of e4m3 then holds the code's magnitude in bits 2-4: .5 * 2^-6 is an e4m3
// subnormal, 2^-6 its smallest normal. The conversion of the signed floats is for their sign bits
// only; it keeps that of zero.
Q2_INLINE u32 pack_codes(const float (&magnitude)[8], const float (&sign)[8]) {
  u32 even = to_e4m3x4(magnitude[0], magnitude[2], magnitude[4], magnitude[6]);
  u32 odd = to_e4m3x4(magnitude[1], magnitude[3], magnitude[5], magnitude[7]);
  u32 even_signs = to_e4m3x4(sign[0], sign[2], sign[4], sign[6]);
  u32 odd_signs = to_e4m3x4(sign[1], sign[3], sign[5], sign[7]);
  u32 signs = (odd_signs & 0x80808080u) | ((even_signs >> 4) & 0x08080808u);
  return ((even >> 2) + odd * 4) | signs;
}

// Rounds 16 pairs to e2m1. `scaled` holds magnitudes times 2^-6, none above 7 * 2^-6; so does
// `rounded`.
//
// The step of the grid around |x| is 2^(e-1), e = max(exponent of |x|, 0). m = max(|x|, 1) times
// 2^22 is a whole number of steps whose last mantissa bit weighs one step, so that the float adder
// rounds |x| to the grid; taking m off again is exact. In a tie m is even, for a tie has 3
// significant bits: ties go to even codes. From 6.5 up to 7 the nearest point of the grid is 6:
// nothing to clip.
Q2_INLINE void round_block(const Pair (&scaled)[16], const Pair (&x)[16], Pair (&rounded)[16],
                           u32 (&codes)[2][2]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    Pair m = {fmaxf(scaled[i].a, 0x1p-6f), fmaxf(scaled[i].b, 0x1p-6f)};
    rounded[i] = fma(m, both(-0x1p22f), fma(m, both(0x1p22f), scaled[i]));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float magnitude[8], sign[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitude[i] = rounded[8 * half + i].a, sign[i] = x[8 * half + i].a;
    codes[0][half] = pack_codes(magnitude, sign);
#pragma unroll
    for (int i = 0; i < 8; ++i) magnitude[i] = rounded[8 * half + i].b, sign[i] = x[8 * half + i].b;
    codes[1][half] = pack_codes(magnitude, sign);
  }
}
#endif

// Two blocks of 16, one in each half of the pairs.
// codes[h]: eight bytes of half h. Returns p * S of each: what a code is worth, before the split
// into block and global scale.
Q2_INLINE Pair ms_eden(const Pair (&x)[16], u32 (&codes)[2][2]) {
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
  return {pseudo.a * (projection.a == 0.0f ? 1.0f : divide(square.a, projection.a)),
          pseudo.b * (projection.b == 0.0f ? 1.0f : divide(square.b, projection.b))};
}
