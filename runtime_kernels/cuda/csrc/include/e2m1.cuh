// SPDX-License-Identifier: Apache-2.0
// Rounding to e2m1 of blocks of 16 in registers, two at a time, one in each half of the pairs: the
// arithmetic of numerics/formats.py, to the bit.
//
// Elements to be rounded are divided by their block's scale already. Their magnitude is below 7, or
// with kClips below 16. On GPUs without fp4 conversions an element is held as its magnitude times 2^-6
// (kUnit), and the element is passed as well, for its sign.
#pragma once
#include "tile.cuh"

constexpr float kUnit = Q2_HW_FP4 ? 1.0f : 0x1p-6f;
constexpr bool kClips = Q2_CLIPS;  // x / scale may be above 6.5 (stochastic: above 6)

// Element i of one of two blocks.
Q2_INLINE float& element(Pair (&x)[16], int member, int i) {
  return member ? x[i].b : x[i].a;
}
Q2_INLINE float element(const Pair (&x)[16], int member, int i) {
  return member ? x[i].b : x[i].a;
}

#if Q2_HW_FP4
// Eight floats to eight codes, and these to four words of two f16.
Q2_INLINE u32 round_eight(const float (&x)[8], u32 (&words)[4]) {
  u32 codes = to_e2m1x8(x);
  // Times a 1 that ptxas does not know. Else it takes each byte from its conversion, and puts the word
  // together by three instructions; now each conversion puts its byte beside those before it.
  from_e2m1x8(codes * power_of_two[0], words);
  return codes;
}

// Eight floats to eight codes, and back to floats.
Q2_INLINE u32 round_eight(const float (&x)[8], float (&rounded)[8]) {
  u32 words[4], codes = round_eight(x, words);
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
  for (int i = 0; i < 4; ++i) {
    float x[8], d[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = element(scaled, i % 2, i / 2 * 8 + j);
    codes[i % 2][i / 2] = round_eight(x, d);
#pragma unroll
    for (int j = 0; j < 8; ++j) element(rounded, i % 2, i / 2 * 8 + j) = d[j];
  }
}
#elif Q2_HW_FP8
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
#else
// The top bytes of four words.
Q2_INLINE u32 top_bytes(u32 w0, u32 w1, u32 w2, u32 w3) {
  return __byte_perm(__byte_perm(w0, w1, 0x0073), __byte_perm(w2, w3, 0x0073), 0x5410);
}

// pack_codes without fp8 conversions. A code's magnitude, times 2^-126, is an fp32 whose bits from the
// 22nd on are the code: .5 is a subnormal there, and 1 the smallest normal.
Q2_INLINE u32 pack_codes(const float (&magnitude)[8], const float (&sign)[8]) {
  u32 two[4], s[8];
#pragma unroll
  for (int i = 0; i < 4; ++i)  // in the top byte
    two[i] = 4 * __float_as_uint(magnitude[2 * i] * 0x1p-120f) +
             64 * __float_as_uint(magnitude[2 * i + 1] * 0x1p-120f);
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i] = __float_as_uint(sign[i]);
  u32 even_signs = top_bytes(s[0], s[2], s[4], s[6]), odd_signs = top_bytes(s[1], s[3], s[5], s[7]);
  u32 signs = (odd_signs & 0x80808080u) | ((even_signs >> 4) & 0x08080808u);
  return top_bytes(two[0], two[1], two[2], two[3]) | signs;
}
#endif

#if !Q2_HW_FP4
// The codes of 16 pairs of magnitudes on the e2m1 grid, with the signs of x.
Q2_INLINE void pack_block(const Pair (&rounded)[16], const Pair (&x)[16], u32 (&codes)[2][2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float magnitude[8], sign[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      magnitude[j] = element(rounded, i % 2, i / 2 * 8 + j);
      sign[j] = element(x, i % 2, i / 2 * 8 + j);
    }
    codes[i % 2][i / 2] = pack_codes(magnitude, sign);
  }
}

// Rounds 16 pairs to e2m1. `scaled` holds magnitudes times 2^-6, none above 7 * 2^-6; so does
// `rounded`.
//
// The step of the grid around |x| is 2^(e-1), e = max(exponent of |x|, 0). m = max(|x|, 1 + 2^-21)
// times 2^22 is a whole number of steps, and |x| less that has a last mantissa bit that weighs one
// step: the float adder rounds |x| to the grid, and adding m * 2^22 back is exact. (Of |x| just above
// 2 or 4 the bit weighs half a step, but then it lies next to a point of the grid. Just below them
// m * 2^22 + |x| would leave its binade, which is why it is taken off first.) In a tie m * 2^22 is
// even: ties go to even codes. From 6.5 up to 7 the nearest point of the grid is 6: nothing to clip.
// Clips before rounding, because m * 2^22 may overflow otherwise.
Q2_INLINE void round_block(const Pair (&scaled)[16], const Pair (&x)[16], Pair (&rounded)[16],
                           u32 (&codes)[2][2]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    Pair v = scaled[i];
    if constexpr (kClips) v = {fminf(v.a, 6.0f * kUnit), fminf(v.b, 6.0f * kUnit)};
    Pair m = {fmaxf(v.a, 0x1.000008p-6f), fmaxf(v.b, 0x1.000008p-6f)};
    rounded[i] = fma(m, both(0x1p22f), fma(m, both(-0x1p22f), v));
  }
  pack_block(rounded, x, codes);
}
#endif

// round_block that also returns the rounding errors, of either sign. On a Blackwell they come from
// instructions that subtract fp32 from f16, so rounded values are computed only for kDequantized.
Q2_INLINE void round_with_errors(const Pair (&scaled)[16], const Pair (&x)[16], Pair (&rounded)[16],
                                 Pair (&errors)[16], u32 (&codes)[2][2]) {
  if constexpr (kDequantized || !Q2_HW_FP4) {
    round_block(scaled, x, rounded, codes);
#pragma unroll
    for (int i = 0; i < 16; ++i) errors[i] = sub(scaled[i], rounded[i]);
    return;
  }
#if Q2_HW_FP4
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[8];
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] = element(scaled, i % 2, i / 2 * 8 + j);
    codes[i % 2][i / 2] = round_eight(y, words);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      Pair two = f16x2_minus(words[j], y[2 * j], y[2 * j + 1]);
      element(errors, i % 2, i / 2 * 8 + 2 * j) = two.a;
      element(errors, i % 2, i / 2 * 8 + 2 * j + 1) = two.b;
    }
  }
#endif
}

// x becomes its rounded values, in kUnit, with its own signs.
Q2_INLINE void with_signs(const Pair (&rounded)[16], Pair (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if constexpr (Q2_HW_FP4) x[i] = rounded[i];
    else x[i] = {copysignf(rounded[i].a, x[i].a), copysignf(rounded[i].b, x[i].b)};
  }
}

// x / scale * 2^-126 to the point of the grid below or above it, with its sign. There .5 falls on an
// fp32 subnormal and 1 on the smallest normal, so that the bits from the 22nd on are the code of the
// point below, and those under them the fraction of a step, to the nearest 2^-22. 22 random bits, the
// upper ones of a word, carry into the code as often as the fraction says.
Q2_INLINE float stochastic(float scaled, u32 random) {
  return __uint_as_float((__float_as_uint(scaled) + (random >> 10)) & 0xFFC00000u);
}

// The word whose upper 22 bits are those of element i of eight (numerics/philox.py, element_bits).
Q2_INLINE u32 random_of(const uint4 (&drawn)[1], int i) {
  u32 word = word_of(drawn, i / 2);
  return i % 2 ? __byte_perm(word, 0, 0x1032) : word;
}

// Codes of eight elements on the grid, in kUnit.
Q2_INLINE u32 codes_of(const float (&x)[8]) {
#if Q2_HW_FP4
  return to_e2m1x8(x);
#elif Q2_HW_FP8
  u32 even = to_e4m3x4(x[0], x[2], x[4], x[6]), odd = to_e4m3x4(x[1], x[3], x[5], x[7]);
  u32 signs = (odd & ~0x08080808u) | ((even >> 4) & 0x08080808u);
  return ((odd * 4) & ~0x0F0F0F0Fu) | ((even >> 2) & 0x0F0F0F0Fu) | (signs & 0x88888888u);
#else
  return pack_codes(x, x);
#endif
}
