// Rounding rules for two blocks of 16 in registers, one in each half of the pairs: those of
// runtime_kernels/nvfp4.py and mxfp4.py, to the bit.
//
//   MS_EDEN  codes and a worth from the block alone; the norm comes later     ms_eden.cuh
//   POW2     p = largest / vmax to 4 significant bits, code = round(x / p); the worth is p
//   EXACT    g from the tensor's largest, known; s = e4m3(largest / vmax / g), code = round(x/g/s)
//   MX       s = 2^(floor(log2 largest) - 2) of a block of 32, code = round(shrink * x / s)
//   AMAX     nothing but the largest of the rotated numbers, which EXACT needs first
//
// round is to the nearest, ties to even, or stochastic: coin i of element i of the padded result,
// row-major. All but MS_EDEN and AMAX round x = u * factor, where u was rotated without its norm.
//
// The bits are the reference's for blocks of zeros and those whose largest |u| is within
// [2^-96, 2^120): what x is multiplied by and what it becomes is then far from fp32's subnormals.
#pragma once
#include "ms_eden.cuh"
#include "tile.cuh"

enum Rule { MS_EDEN, POW2, EXACT, MX, AMAX };

constexpr Rule kRule = (Rule)Q2_RULE;
constexpr bool kStochastic = Q2_STOCHASTIC;
constexpr bool kClips = Q2_CLIPS;  // x / scale may be above 6.5 (stochastic: above 6)
constexpr float kShrink = Q2_SHRINKS ? 0.75f : 1.0f;
// Where a block's largest lands on the grid (schemes.py, SR_HEADROOM).
constexpr double kVmax = Q2_HEADROOM ? 6.0 * (16.0 / 17.0) : 6.0;
constexpr double kCap = 448.0;
// The factor is a power of two: it may as well go to the scale.
constexpr bool kFolds = !kPacked && (kSize == 1 || kSize == 16 || kSize == 64);
constexpr float kHuge = 3.402823466e38f;

// What the numbers of one direction have in common.
struct Common {
  float factor;
  float unit, inverse_unit;  // EXACT: g and 1 / g
};

// Of a block: what is stored, and what x is multiplied by.
struct BlockScale {
  u32 stored;
  float inverse;
};

// g of the reference (nvfp4.py, exact_global_scale), from the bits of max |u|.
Q2_INLINE float exact_unit(u32 largest, float factor) {
  float amax = __uint_as_float(largest) * factor;
  if (!(amax <= kHuge)) return __uint_as_float(0x7FC00000u);
  float unit = __fdiv_rn(amax, (float)(kVmax * kCap));
  return unit == 0.0f ? 1.0f : fmaxf(unit, 0x1p-126f);
}

// x / divisor to the nearest, given 1 / divisor to the nearest: one step of Newton's from within an
// ulp (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
Q2_INLINE float divide_by(float x, float divisor, float reciprocal) {
  float q = x * reciprocal;
  return __fmaf_rn(__fmaf_rn(-divisor, q, x), reciprocal, q);
}

Q2_INLINE BlockScale block_scale(float largest, const Common& common) {
  if constexpr (kRule == MX) {
    u32 byte = (u32)min(max((int)(__float_as_uint(largest) >> 23) - 2, 0), 253);
    return {byte, kShrink * __uint_as_float((254 - byte) << 23)};
  } else if constexpr (kRule == EXACT) {
    constexpr float vmax = (float)kVmax;
    float q = divide_by(largest, vmax, (float)(1.0 / vmax));
    u32 byte = to_e4m3(divide_by(q, common.unit, common.inverse_unit));
    return {byte, fminf(divide(common.inverse_unit, byte ? from_e4m3(byte) : 1.0f), kHuge)};
  } else {
    float p = keep_4_bits(largest * (float)(1.0 / kVmax));
    u32 stored = p >= 0x1p-126f ? __float_as_uint(p) : 0;
    return {largest <= kHuge ? stored : 0x7FC00000u, reciprocal(fmaxf(p, 0x1p-126f))};
  }
}

Q2_INLINE Pair largest_of_block(const Pair (&x)[16]) {
  Pair largest = {fabsf(x[0].a), fabsf(x[0].b)};
#pragma unroll
  for (int i = 1; i < 16; ++i)
    largest = {max_or_nan(largest.a, fabsf(x[i].a)), max_or_nan(largest.b, fabsf(x[i].b))};
  return largest;
}

// A magnitude times unit, clipped if that is needed.
Q2_INLINE float within_6(float magnitude, float unit = 1.0f) {
  return kClips ? fminf(magnitude, 6.0f * unit) : magnitude;
}

Q2_INLINE void round_to_nearest(const Pair (&x)[16], Pair inverse, u32 (&codes)[2][2]) {
  Pair scaled[16], rounded[16];
  inverse = mul(inverse, both(kUnit));
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    // Hardware conversions take the sign along, and clip.
    if constexpr (Q2_HW_FP4) scaled[i] = mul(x[i], inverse);
    else
      scaled[i] = {within_6(fabsf(x[i].a) * inverse.a, kUnit),
                   within_6(fabsf(x[i].b) * inverse.b, kUnit)};
  }
  round_block(scaled, x, rounded, codes);
}

// first: Philox blocks of the coins of the two blocks.
Q2_INLINE void round_stochastically(const Pair (&x)[16], Pair inverse, const Output& out,
                                    const u32 (&first)[2], u32 (&codes)[2][2]) {
  u64 seed = *out.seed;
#pragma unroll
  for (int member = 0; member < 2; ++member) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float a[8], sign[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        Pair v = x[8 * half + i];
        sign[i] = member ? v.b : v.a;
        a[i] = within_6(fabsf(sign[i]) * (member ? inverse.b : inverse.a));
      }
      codes[member][half] = stochastic_eight(a, sign, seed, first[member] + 2 * half, out.stream);
    }
  }
}

// Rounds two blocks whose largest magnitudes are given, before the factor. Returns what is to be
// stored of each.
Q2_INLINE uint2 round_blocks(Pair (&x)[16], Pair largest, const Common& common, const Output& out,
                             const u32 (&first)[2], u32 (&codes)[2][2]) {
  largest = mul(largest, both(common.factor));
  BlockScale a = block_scale(largest.a, common), b = block_scale(largest.b, common);
  Pair inverse = {a.inverse, b.inverse};
  if constexpr (kFolds) {
    inverse = mul(inverse, both(common.factor));
  } else {
#pragma unroll
    for (Pair& v : x) v = mul(v, both(common.factor));
  }
  if constexpr (kStochastic) round_stochastically(x, inverse, out, first, codes);
  else round_to_nearest(x, inverse, codes);
  return {a.stored, b.stored};
}
