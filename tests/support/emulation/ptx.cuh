// SPDX-License-Identifier: Apache-2.0
// Stands in for ptx.cuh of runtime_kernels on a CPU: the same functions in plain C++, from the
// PTX manual's words.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define Q2_INLINE inline

struct Pair {
  float a, b;
};

Q2_INLINE Pair both(float x) {
  return {x, x};
}
Q2_INLINE Pair add(Pair x, Pair y) {
  return {x.a + y.a, x.b + y.b};
}
Q2_INLINE Pair sub(Pair x, Pair y) {
  return {x.a - y.a, x.b - y.b};
}
Q2_INLINE Pair mul(Pair x, Pair y) {
  return {x.a * y.a, x.b * y.b};
}
Q2_INLINE Pair fma(Pair x, Pair y, Pair w) {
  return {fmaf(x.a, y.a, w.a), fmaf(x.b, y.b, w.b)};
}
Q2_INLINE Pair fma_toward_zero(Pair x, Pair y, Pair w) {
  return {__fmaf_rz(x.a, y.a, w.a), __fmaf_rz(x.b, y.b, w.b)};
}

Q2_INLINE Pair sum_and_difference(Pair x) {
  return {x.a + x.b, x.a - x.b};
}
Q2_INLINE u64 mul_wide(u32 x, u32 y) {
  return (u64)x * y;
}
Q2_INLINE float within(float x, float limit) {
  return copysignf(fminf(fabsf(x), limit), x);
}
// One ulp off to either side by a hash of x: a kernel must not depend on how good the approximation
// is.
Q2_INLINE float approximate_reciprocal(float x) {
  if (fabsf(x) < 0x1p-126f) return copysignf(INFINITY, x);
  float r = 1.0f / x;
  if (!std::isfinite(r) || fabsf(r) < 0x1p-126f) return std::isfinite(r) ? copysignf(0.0f, x) : r;
  return __uint_as_float(__float_as_uint(r) + __float_as_uint(x) * 2654435761u % 3 - 1);
}

Q2_INLINE float approximate_exp2(float x) {
  return exp2f(x);
}
Q2_INLINE float divide_full(float a, float b) {
  return a / b;
}

Q2_INLINE float max_or_nan(float x, float y) {
  return std::isnan(x) || x > y ? x : y;
}
Q2_INLINE float min_or_nan(float x, float y) {
  return std::isnan(x) || x < y ? x : y;
}

// x to the nearest number with `mantissa` bits after the leading one and exponents from `lowest`
// on, at most `limit`.
inline float round_to(float x, int mantissa, int lowest, float limit) {
  if (std::isnan(x)) return x;
  if (std::isinf(x)) return copysignf(limit, x);
  int exponent = x == 0 ? lowest : std::max(std::ilogb(x), lowest);
  double step = std::ldexp(1.0, exponent - mantissa);
  double rounded = std::nearbyint(std::min((double)fabsf(x) / step, 0x1p60)) * step;
  return copysignf((float)std::min(rounded, (double)limit), x);
}
// The bits of x, which must be such a number.
inline u32 bits_of(float x, int mantissa, int lowest, int width) {
  float magnitude = fabsf(x);
  int exponent = magnitude == 0 ? lowest : std::max(std::ilogb(magnitude), lowest);
  int steps = (int)std::ldexp(magnitude, mantissa - exponent);
  return (std::signbit(x) ? 1u << (width - 1) : 0) |
         (u32)(((exponent - lowest) << mantissa) + steps);
}
inline float value_of(u32 bits, int mantissa, int lowest, int width) {
  int magnitude = bits & ((1u << (width - 1)) - 1), exponent = magnitude >> mantissa,
      fraction = magnitude & ((1 << mantissa) - 1);
  float x = exponent
                ? std::ldexp((float)(fraction + (1 << mantissa)), exponent - 1 + lowest - mantissa)
                : std::ldexp((float)fraction, lowest - mantissa);
  return bits >> (width - 1) & 1 ? -x : x;
}

Q2_INLINE float from_f16(u32 bits) {
  return (float)bit_cast<_Float16>((uint16_t)bits);
}
Q2_INLINE u32 to_f16(float x) {
  return bit_cast<uint16_t>((_Float16)x);
}
Q2_INLINE Pair from_f16x2(u32 word) {
  return {from_f16(word & 0xFFFF), from_f16(word >> 16)};
}
Q2_INLINE u32 to_f16x2(float low, float high) {
  return to_f16(low) | to_f16(high) << 16;
}
// The product of two f16 is exact in fp32.
Q2_INLINE u32 mul_f16x2(u32 x, u32 y) {
  Pair p = mul(from_f16x2(x), from_f16x2(y));
  return to_f16x2(p.a, p.b);
}
// In double a product of f16 and its sum with another are exact for what is asked here.
Q2_INLINE u32 fma_f16(u32 x, u32 y, u32 w) {
  return bit_cast<uint16_t>((_Float16)((double)from_f16(x) * from_f16(y) + from_f16(w)));
}
Q2_INLINE u32 fma_f16x2(u32 x, u32 y, u32 w) {
  return fma_f16(x & 0xFFFF, y & 0xFFFF, w & 0xFFFF) | fma_f16(x >> 16, y >> 16, w >> 16) << 16;
}
// The one that is a number, where the other is NaN.
Q2_INLINE u32 max_f16x2(u32 x, u32 y) {
  Pair a = from_f16x2(x), b = from_f16x2(y);
  return to_f16x2(fmaxf(a.a, b.a), fmaxf(a.b, b.b));
}
Q2_INLINE u32 min_f16x2(u32 x, u32 y) {
  Pair a = from_f16x2(x), b = from_f16x2(y);
  return to_f16x2(fminf(a.a, b.a), fminf(a.b, b.b));
}
// Elements (row, column) of the matrices are those that lanes read: of matrix i row r where lane 8 i
// + r says.
Q2_INLINE void load_transposed(const u8* shared, u32 (&x)[4]) {
  addresses[threadIdx.x] = shared;
  __syncwarp();
  unsigned warp = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    auto element = [&](unsigned row) {
      return (u32)((const u16*)addresses[warp + 8 * i + row])[lane / 4];
    };
    x[i] = element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
  }
  __syncwarp();
}
Q2_INLINE u32 to_bf16(float x) {
  u32 bits = __float_as_uint(x);
  if (std::isnan(x)) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
Q2_INLINE u32 to_bf16x2(float low, float high) {
  return to_bf16(low) | to_bf16(high) << 16;
}
// The product of two bf16 is exact in fp32.
Q2_INLINE u32 mul_bf16x2(u32 x, u32 y) {
  return to_bf16x2(__uint_as_float(x << 16) * __uint_as_float(y << 16),
                   __uint_as_float(x & 0xFFFF0000u) * __uint_as_float(y & 0xFFFF0000u));
}
Q2_INLINE Pair signed_bf16x2(u32 word, u32 sign_low, u32 sign_high) {
  return {__uint_as_float(word << 16) * __uint_as_float(sign_low & 0xFFFF0000u),
          __uint_as_float(word & 0xFFFF0000u) * __uint_as_float(sign_high & 0xFFFF0000u)};
}

Q2_INLINE Pair times_signs_bf16x2(u32 word, u32 signs) {
  return mul({__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)},
             {__uint_as_float(signs << 16), __uint_as_float(signs & 0xFFFF0000u)});
}
Q2_INLINE Pair times_signs_f16x2(u32 word, u32 signs) {
  return mul(from_f16x2(word), from_f16x2(signs));
}
Q2_INLINE float plus_bf16x2(float x, u32 word) {
  return x + __uint_as_float(word << 16) + __uint_as_float(word & 0xFFFF0000u);
}
Q2_INLINE float plus_f16x2(float x, u32 word) {
  Pair two = from_f16x2(word);
  return x + two.a + two.b;
}
Q2_INLINE Pair f16x2_minus(u32 word, float a, float b) {
  return sub(from_f16x2(word), {a, b});
}

Q2_INLINE float decode_e4m3(u32 byte) {
  return (byte & 0x7F) == 0x7F ? NAN : value_of(byte, 3, -6, 8);
}
Q2_INLINE u32 encode_e4m3(float x) {
  return std::isnan(x) ? 0x7F : bits_of(round_to(x, 3, -6, 448), 3, -6, 8);
}
#if Q2_HW_FP8
Q2_INLINE u32 e4m3x2_to_f16x2(u32 bytes) {
  return to_f16x2(decode_e4m3(bytes & 0xFF), decode_e4m3(bytes >> 8 & 0xFF));
}
Q2_INLINE u32 to_e4m3x4(float x0, float x1, float x2, float x3) {
  return encode_e4m3(x0) | encode_e4m3(x1) << 8 | encode_e4m3(x2) << 16 | encode_e4m3(x3) << 24;
}
#endif

// NaN becomes +6 (PTX: satfinite, as the format has no NaN).
Q2_INLINE u32 to_e2m1x8(const float (&x)[8]) {
  u32 codes = 0;
  for (int i = 0; i < 8; ++i)
    codes |= (std::isnan(x[i]) ? 7u : bits_of(round_to(x[i], 1, 0, 6), 1, 0, 4)) << (4 * i);
  return codes;
}
Q2_INLINE void from_e2m1x8(u32 codes, u32 (&words)[4]) {
  for (int i = 0; i < 4; ++i)
    words[i] = to_f16x2(value_of(codes >> (8 * i) & 15, 1, 0, 4),
                        value_of(codes >> (8 * i + 4) & 15, 1, 0, 4));
}

Q2_INLINE void copy_async(void* shared, const void* global) {
  memcpy(shared, global, 16);
}
Q2_INLINE void commit_copies() {}
Q2_INLINE void await_copies() {}

Q2_INLINE void await_previous_kernel() {}
Q2_INLINE void allow_next_kernel() {}
