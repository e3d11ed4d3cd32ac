// SPDX-License-Identifier: Apache-2.0
// Rounding rules for two blocks of 16 in registers, one in each half of the pairs: those of
// numerics/nvfp4.py and mxfp4.py, to the bit.
//
//   MS_EDEN  codes and a raw scale from the block alone; the norm comes later     ms_eden.cuh
//   POW2     p = largest / vmax to 4 significant bits, code = round(x / p); the raw scale is p
//   EXACT    g from the tensor's largest, known; s = e4m3(largest / vmax / g), code = round(x/g/s)
//   MX       s = 2^(floor(log2 largest) - 2) of a block of 32, code = round(shrink * x / s)
//            Q2_RCEIL: s = 2^ceil(log2(largest / 6))
//            Q2_MASKED: s = 2^round(log2(2.92247856/6 * rms)), and which |x / s| < 6 (QuEST)
//   AMAX     only the largest rotated element, which EXACT needs first
//
// A block that is not finite gets a scale or a raw scale of NaN, and any codes (numerics/blocks.py).
//
// round is to the nearest, ties to even, or stochastic: random bits i of element i of the padded result,
// row-major. x = u * factor, where u was rotated without its norm: the factor goes to the scale, or to
// what u is multiplied by; QuEST's squares are of x.
//
// The bits are the reference's for blocks of zeros and those whose largest |u| is within
// [2^-96, 2^120): what x is multiplied by and what it becomes is then far from fp32's subnormals.
#pragma once
#include "ms_eden.cuh"
#include "groups.cuh"

constexpr bool kRawScales = kRule == MS_EDEN || kRule == POW2;
constexpr bool kStochastic = Q2_STOCHASTIC;
constexpr bool kMasked = Q2_MASKED;
constexpr float kShrink = Q2_SHRINKS ? 0.75f : 1.0f;
// Where a block's largest lands on the grid (schemes.py, SR_HEADROOM).
constexpr double kVmax = Q2_HEADROOM ? 6.0 * (16.0 / 17.0) : 6.0;
// 4/6: of the scales that map a block's largest to 6 and to 4, the one with the smaller squared error.
constexpr bool kSelects = Q2_SELECTS;
// Scale search: e4m3 steps from the scale that maps a block's largest to 6, those other than 0 in the
// order of the scheme; step + 8 in 4 bits each, the first in the lowest.
constexpr u32 kSteps = Q2_STEPS;
constexpr int kOthers = 1 + (kSteps > 0xF) + (kSteps > 0xFF) + (kSteps > 0xFFF);
static_assert(kSteps <= 0xFFFF, "five scales at most");
constexpr double kCap = kSelects ? 256.0 : 448.0;  // EXACT: schemes.py
constexpr float kHuge = 3.402823466e38f;

// Values that all blocks of one output share.
struct Common {
  float factor;
  float global_scale, inverse_global_scale;  // EXACT: g and 1 / g
};

// A block's scale: as it is stored, and as the factor of x.
struct BlockScale {
  u32 stored;
  float inverse;
};

// g of the reference (nvfp4.py, exact_global_scale), from the bits of max |u|.
Q2_INLINE float exact_global_scale(u32 largest, float factor) {
  float amax = __uint_as_float(largest) * factor;
  if (!(amax <= kHuge)) return __uint_as_float(0x7FC00000u);
  float g = __fdiv_rn(amax, (float)(kVmax * kCap));
  return g == 0.0f ? 1.0f : fmaxf(g, 0x1p-126f);
}

// x / divisor to the nearest, given 1 / divisor to the nearest: one step of Newton's from within an
// ulp (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
Q2_INLINE float divide_by(float x, float divisor, float reciprocal) {
  float q = x * reciprocal;
  return __fmaf_rn(__fmaf_rn(-divisor, q, x), reciprocal, q);
}

// The scale of each member of a pair of blocks, given their largest magnitudes.
struct BlockScales {
  BlockScale of[2];
};

Q2_INLINE BlockScale block_scale(float largest, const Common& common, const double to) {
  if constexpr (kRule == MX) {
    constexpr u32 kAbove = Q2_RCEIL ? 0x3FFFFF : 0;  // carries where the significand is above 1.5
    u32 byte = (u32)min(max((int)((__float_as_uint(largest) + kAbove) >> 23) - 2, 0), 253);
    return {largest <= kHuge ? byte : 255, kShrink * __uint_as_float((254 - byte) << 23)};
  } else {
    const float vmax = (float)to;
    float q = divide_by(largest, vmax, (float)(1.0 / vmax));
    // An amax that is far too small must saturate the scale: the quotient may not become Inf, nor then
    // NaN. g is at most 2^128 / 1536.
    q = min_or_nan(q, 512.0f * common.global_scale);
    u32 byte = to_e4m3(divide_by(q, common.global_scale, common.inverse_global_scale));
    return {byte, fminf(divide(common.inverse_global_scale, byte ? from_e4m3(byte) : 1.0f), kHuge)};
  }
}
Q2_INLINE BlockScales block_scales(Pair largest, const Common& common, const double to = kVmax) {
  if constexpr (kRule != POW2)
    return {block_scale(largest.a, common, to), block_scale(largest.b, common, to)};
  Pair p = mul(largest, both((float)(1.0 / to)));
  p = {keep_4_bits(p.a), keep_4_bits(p.b)};
  Pair inverse = negative_reciprocals({fminf(-p.a, -0x1p-126f), fminf(-p.b, -0x1p-126f)});
  // A scale search takes no steps from 0. 4/6 may compare scales below 2^-126: both give the same codes.
  auto stored = [](float p) { return kSteps && p < 0x1p-126f ? 0 : __float_as_uint(p); };
  return {stored(p.a), inverse.a, stored(p.b), inverse.b};
}

// POW2: what is stored of a block's scale, once it is chosen. 0 for blocks that count as zeros.
Q2_INLINE u32 raw_scale(BlockScale scale, float largest) {
  u32 stored = __uint_as_float(scale.stored) >= 0x1p-126f ? scale.stored : 0;
  return largest <= kHuge ? stored : 0x7FC00000u;
}

// x times the factor of u, which is 1 where nothing is rotated and nothing was quantized before.
Q2_INLINE Pair by_factor(Pair x, const Common& common) {
  if constexpr (kSize == 1 && !kScaled) return x;
  return mul(x, both(common.factor));
}

// The factor of u. For a block of zeros the product may be too large.
Q2_INLINE Pair times_factor(const BlockScales& scales, const Common& common) {
  Pair inverse = by_factor({scales.of[0].inverse, scales.of[1].inverse}, common);
  return kScaled ? Pair{fminf(inverse.a, kHuge), fminf(inverse.b, kHuge)} : inverse;
}

Q2_INLINE Pair largest_of_block(const Pair (&x)[16]) {
  Pair largest = {fabsf(x[0].a), fabsf(x[0].b)};
#pragma unroll
  for (int i = 1; i < 16; ++i)
    largest = {max_or_nan(largest.a, fabsf(x[i].a)), max_or_nan(largest.b, fabsf(x[i].b))};
  return largest;
}

// x times inverse, in kUnit, as round_block wants it.
Q2_INLINE Pair scaled_by(Pair x, Pair inverse) {
  if constexpr (Q2_HW_FP4) return mul(x, inverse);  // these conversions take the sign along
  else return {fabsf(x.a) * inverse.a, fabsf(x.b) * inverse.b};
}

// Sums of the squared errors of two blocks in units of their scales, each square rounded to a multiple of
// 2^-14. A sum in [512, 1024) has that as its last bit, and an fma rounds a square once, as it is added.
// No square lies halfway between two multiples, since 2^-15 times an odd number is none; so the order
// does not matter. rounded, codes: as round_block has them.
Q2_INLINE Pair errors_of(const Pair (&x)[16], Pair inverse, Pair (&rounded)[16],
                         u32 (&codes)[2][2]) {
  constexpr float kStart = 512.0f * kUnit * kUnit;
  Pair scaled[16], errors[16], squares = both(kStart);
  inverse = mul(inverse, both(kUnit));
#pragma unroll
  for (int i = 0; i < 16; ++i) scaled[i] = scaled_by(x[i], inverse);
  round_with_errors(scaled, x, rounded, errors, codes);
#pragma unroll
  for (int i = 0; i < 16; ++i) squares = fma(errors[i], errors[i], squares);
  return add(squares, both(-kStart));
}

// The scale `step` e4m3 steps above another (nvfp4.py, _stepped).
Q2_INLINE BlockScale stepped(BlockScale scale, int step, const Common& common) {
  if constexpr (kRule == POW2) {
    u32 stored = scale.stored + (u32)(step * (1 << 20));  // a step of 4 significant bits
    bool exists = scale.stored && __uint_as_float(scale.stored) <= kHuge && stored >= 0x00800000u;
    return exists ? BlockScale{stored, reciprocal(__uint_as_float(stored))} : scale;
  } else {
    u32 byte = scale.stored;
    if (byte == 0 || byte >= 0x7E || (step < 0 && byte < 8)) return scale;
    byte = (u32)min((int)byte + step, 0x7E);
    return {byte, fminf(divide(common.inverse_global_scale, from_e4m3(byte)), kHuge)};
  }
}

// The i-th scales that are compared with the first.
Q2_INLINE BlockScales other_scales(int i, const BlockScales& first, Pair largest, const Common& common) {
  if constexpr (!kSteps) return block_scales(largest, common, kVmax / 1.5);
  int step = (int)(kSteps >> 4 * i & 15) - 8;
  return {stepped(first.of[0], step, common), stepped(first.of[1], step, common)};
}

Q2_INLINE float e4m3_or_one(u32 byte) {
  return byte ? from_e4m3(byte) : 1.0f;
}

// Errors in units of `scales`, in those of `first`.
Q2_INLINE Pair errors_in(const BlockScales& first, const BlockScales& scales, Pair errors) {
  const BlockScale(&f)[2] = first.of, (&s)[2] = scales.of;
  Pair ratio;
  if constexpr (kRule == POW2)
    ratio = mul({__uint_as_float(s[0].stored), __uint_as_float(s[1].stored)}, {f[0].inverse, f[1].inverse});
  else
    ratio = {__fdiv_rn(e4m3_or_one(s[0].stored), e4m3_or_one(f[0].stored)),
             __fdiv_rn(e4m3_or_one(s[1].stored), e4m3_or_one(f[1].stored))};
  return mul(errors, mul(ratio, ratio));
}

// Two blocks by the one of their scales each that has the smallest error, the first of them in a tie;
// `scales` come as the first. The rounded values of the best scale so far are saved, since rounding
// twice takes more.
Q2_INLINE void round_by_errors(Pair (&x)[16], Pair largest, const Common& common, Pair inverse,
                               BlockScales& scales, u32 (&codes)[2][2]) {
  const BlockScales first = scales;
  BlockScales others[kOthers];
#pragma unroll
  for (int i = 0; i < kOthers; ++i) others[i] = other_scales(i, first, largest, common);
  Pair rounded[16];
  Pair least = errors_of(x, inverse, rounded, codes);
  if constexpr (kSteps)  // under POW2 a scale times its reciprocal is not always 1
    least = errors_in(first, first, least);
#pragma unroll
  for (int i = 0; i < kOthers; ++i) {
    const BlockScales& other = others[i];
    Pair by_other[16];
    u32 codes_by_other[2][2];
    Pair errors =
        errors_of(x, times_factor(other, common), by_other, codes_by_other);
    errors = errors_in(first, other, errors);
    bool takes[2] = {errors.a < least.a, errors.b < least.b};
    least = {takes[0] ? errors.a : least.a, takes[1] ? errors.b : least.b};
#pragma unroll
    for (int member = 0; member < 2; ++member) {
      u32& stored = scales.of[member].stored;
      stored = takes[member] ? other.of[member].stored : stored;
#pragma unroll
      for (int j = 0; j < 16; ++j)
        if (takes[member]) element(rounded, member, j) = element(by_other, member, j);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (takes[member]) codes[member][half] = codes_by_other[member][half];
    }
  }
#if !Q2_HW_FP4
  pack_block(rounded, x, codes);  // once, instead of both and a choice
#endif
  with_signs(rounded, x);
}

Q2_INLINE void round_to_nearest(Pair (&x)[16], Pair inverse, u32 (&codes)[2][2]) {
  Pair scaled[16], rounded[16];
  if constexpr (kUnit != 1.0f) inverse = mul(inverse, both(kUnit));
#pragma unroll
  for (int i = 0; i < 16; ++i) scaled[i] = scaled_by(x[i], inverse);
  round_block(scaled, x, rounded, codes);
  with_signs(rounded, x);
}

// first: Philox blocks of the random bits of the two blocks.
Q2_INLINE void round_stochastically(Pair (&x)[16], Pair inverse, const Output& out,
                                    const u32 (&first)[2], u32 (&codes)[2][2]) {
  u64 seed = *out.seed;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Pair y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      Pair v = mul(x[8 * half + i], inverse);
      if constexpr (kClips && !Q2_HW_FP4) v = {within(v.a, 6.0f), within(v.b, 6.0f)};
      y[i] = mul(v, both(0x1p-126f));
    }
#pragma unroll
    for (int member = 0; member < 2; ++member) {
      uint4 drawn[1];
      u32 index = first[member] + half + (half ? codes[member][0] * zero : 0);
      philox(seed, index, out.rng_offset, RANDOM_BITS, drawn);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& v = member ? y[i].b : y[i].a;
        v = stochastic(v, random_of(drawn, i));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[8 * half + i] = y[i] = mul(y[i], both(0x1p126f * kUnit));
#pragma unroll
    for (int member = 0; member < 2; ++member) {
      float eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = member ? y[i].b : y[i].a;
      codes[member][half] = codes_of(eight);
    }
  }
}

// Rounds two blocks whose largest magnitudes are given, before the factor; x becomes what its codes
// stand for, in kUnit. Returns what is to be stored of each.
Q2_INLINE uint2 round_blocks(Pair (&x)[16], Pair largest, const Common& common, const Output& out,
                             const u32 (&first)[2], u32 (&codes)[2][2]) {
  largest = by_factor(largest, common);
  BlockScales scales = block_scales(largest, common);
  Pair inverse = times_factor(scales, common);
  if constexpr (kStochastic) round_stochastically(x, inverse, out, first, codes);
  else if constexpr (!kSelects) round_to_nearest(x, inverse, codes);
  else round_by_errors(x, largest, common, inverse, scales, codes);
  if constexpr (kRule != POW2) return {scales.of[0].stored, scales.of[1].stored};
  return {raw_scale(scales.of[0], largest.a), raw_scale(scales.of[1], largest.b)};
}

// Byte of QuEST's scale of a block of 32 from its mean square, scaled by 2^(127 - top) twice
// (mxfp4.py, _quest_exponent).
Q2_INLINE u32 quest_byte(float mean_square, int top) {
  constexpr float kClip = (float)((2.92247856 / 6.0) * (2.92247856 / 6.0));
  int exponent = (int)(__float_as_uint(mean_square * kClip) >> 23) - 127;
  return (u32)min(max(top + ((exponent + 1) >> 1), 0), 253);
}

// For x * down, from element `first` on: neighbors first (blocks.py, sum_neighbors), in an order that
// holds few of them at once.
template <int n>
Q2_INLINE Pair sum_of_squares(const Pair (&x)[16], Pair down, int first = 0) {
  if constexpr (n == 1) {
    Pair v = mul(x[first], down);
    return mul(v, v);
  } else {
    Pair left = sum_of_squares<n / 2>(x, down, first);
    return add(left, sum_of_squares<n / 2>(x, down, first + n / 2));
  }
}

// QuEST's rounding of two blocks of 32, one in each half of the pairs, whose largest magnitudes are
// given before the factor. Bit i of `trusted` is set where element i of a block did not clip.
Q2_INLINE uint2 round_trusting(Pair (&x)[2][16], Pair largest, const Common& common,
                               u32 (&codes)[2][2][2], u32 (&trusted)[2]) {
  largest = mul(largest, both(common.factor));
  int top_a = max((int)(__float_as_uint(largest.a) >> 23), 1),
      top_b = max((int)(__float_as_uint(largest.b) >> 23), 1);
  Pair down = {__uint_as_float((u32)(254 - top_a) << 23), __uint_as_float((u32)(254 - top_b) << 23)};
  Pair sums[2];
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll
    for (Pair& v : x[group]) v = mul(v, both(common.factor));
    sums[group] = sum_of_squares<16>(x[group], down);
  }
  Pair mean = mul(add(sums[0], sums[1]), both(1.0f / 32));
  uint2 bytes = {largest.a <= kHuge ? quest_byte(mean.a, top_a) : 255,
                 largest.b <= kHuge ? quest_byte(mean.b, top_b) : 255};
  // For 255 this is -Inf, whose products, Inf or NaN, are not below 6: nothing is trusted.
  Pair inverse = {__uint_as_float((254 - bytes.x) << 23), __uint_as_float((254 - bytes.y) << 23)};
  trusted[0] = trusted[1] = 0;
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      Pair scaled = mul(x[group][i], inverse);
      trusted[0] |= (u32)(fabsf(scaled.a) < 6.0f) << (16 * group + i);
      trusted[1] |= (u32)(fabsf(scaled.b) < 6.0f) << (16 * group + i);
    }
    round_to_nearest(x[group], inverse, codes[group]);
  }
  return bytes;
}
