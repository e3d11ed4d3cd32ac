// SPDX-License-Identifier: Apache-2.0
// Sixteen lanes of fp32 or int32, as one, two or four registers: the widest that the compiler's target has. Each lane
// holds a block of its own, so that no sum crosses lanes, and the bits do not depend on the width of a register.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define Q2_REGISTER 64
#elif defined(__AVX2__)
#define Q2_REGISTER 32
#else
#define Q2_REGISTER 16
#endif

namespace q2 {

constexpr int LANES = 16, PARTS = 64 / Q2_REGISTER;
typedef float FloatRegister __attribute__((vector_size(Q2_REGISTER)));
typedef int32_t IntRegister __attribute__((vector_size(Q2_REGISTER)));
typedef uint32_t UnsignedRegister __attribute__((vector_size(Q2_REGISTER)));
typedef uint64_t LongRegister __attribute__((vector_size(Q2_REGISTER)));

struct F {
    FloatRegister part[PARTS];
};
struct I {
    IntRegister part[PARTS];
};

// Builds a value register by register: register i is part(i).
template <typename T, typename Part>
inline T each(const Part& part) {
    T r;
    for (int i = 0; i < PARTS; i++) r.part[i] = part(i);
    return r;
}

inline F fill(float x) {
    return each<F>([&](int) { return x - FloatRegister{}; });
}
inline I fill(int32_t x) {
    return each<I>([&](int) { return x - IntRegister{}; });
}
inline F load(const float* from) {
    F r;
    std::memcpy(&r, from, sizeof r);
    return r;
}
inline I load(const int32_t* from) {
    I r;
    std::memcpy(&r, from, sizeof r);
    return r;
}
inline void store(float* to, const F& x) { std::memcpy(to, &x, sizeof x); }
inline void store(int32_t* to, const I& x) { std::memcpy(to, &x, sizeof x); }

#define Q2_BINARY(T, OP)                                                  \
    inline T operator OP(const T& a, const T& b) {                        \
        return each<T>([&](int i) { return a.part[i] OP b.part[i]; });    \
    }
Q2_BINARY(F, +) Q2_BINARY(F, -) Q2_BINARY(F, *) Q2_BINARY(F, /)
Q2_BINARY(I, +) Q2_BINARY(I, -) Q2_BINARY(I, &) Q2_BINARY(I, |) Q2_BINARY(I, ^)
#undef Q2_BINARY

// -1 where it holds, else 0. A NaN compares false, but for !=.
#define Q2_COMPARE(T, OP)                                                              \
    inline I operator OP(const T& a, const T& b) {                                     \
        return each<I>([&](int i) { return (IntRegister)(a.part[i] OP b.part[i]); });  \
    }
Q2_COMPARE(F, <) Q2_COMPARE(F, >) Q2_COMPARE(F, ==)
Q2_COMPARE(I, <) Q2_COMPARE(I, >) Q2_COMPARE(I, ==)
#undef Q2_COMPARE

inline I operator~(const I& a) {
    return each<I>([&](int i) { return ~a.part[i]; });
}
inline I operator<<(const I& a, int by) {
    return each<I>([&](int i) { return (IntRegister)((UnsignedRegister)a.part[i] << by); });
}
inline I operator>>(const I& a, int by) {  // arithmetic
    return each<I>([&](int i) { return a.part[i] >> by; });
}
inline I shift_right(const I& a, int by) {  // unsigned
    return each<I>([&](int i) { return (IntRegister)((UnsignedRegister)a.part[i] >> by); });
}
inline I below_unsigned(const I& a, const I& b) {
    return each<I>([&](int i) { return (IntRegister)((UnsignedRegister)a.part[i] < (UnsignedRegister)b.part[i]); });
}
template <typename T>
inline T select(const I& where, const T& a, const T& b) {
    return each<T>([&](int i) { return where.part[i] ? a.part[i] : b.part[i]; });
}
inline I bits(const F& x) {
    return each<I>([&](int i) { return (IntRegister)x.part[i]; });
}
inline F as_float(const I& x) {
    return each<F>([&](int i) { return (FloatRegister)x.part[i]; });
}
inline F to_float(const I& x) {  // of int32
    return each<F>([&](int i) { return __builtin_convertvector(x.part[i], FloatRegister); });
}
inline I to_int(const F& x) {  // toward zero
    return each<I>([&](int i) { return __builtin_convertvector(x.part[i], IntRegister); });
}
inline I most(const I& a, const I& b) { return select(a > b, a, b); }
inline F at_most(const F& x, float limit) {  // a NaN stays, as in torch's clamp
    F most = fill(limit);
    return select(x > most, most, x);
}
inline F at_least(const F& x, float limit) {
    F least = fill(limit);
    return select(x < least, least, x);
}
inline F magnitude(const F& x) { return as_float(bits(x) & fill(0x7FFFFFFF)); }
inline F copy_sign(const F& x, const F& sign) {
    return as_float((bits(x) & fill(0x7FFFFFFF)) | (bits(sign) & fill(INT32_MIN)));
}
inline F or_one(const F& x) { return select(x == fill(0.0f), fill(1.0f), x); }

// Both halves of unsigned products.
inline void multiply(const I& a, uint32_t by, I& high, I& low) {
    const LongRegister factor = by - LongRegister{}, low_half = 0xFFFFFFFFu - LongRegister{};
    for (int i = 0; i < PARTS; i++) {
        LongRegister even = (LongRegister)a.part[i], odd = even >> 32;
#if defined(__AVX512F__)
        even = (LongRegister)_mm512_mul_epu32((__m512i)even, (__m512i)factor);
        odd = (LongRegister)_mm512_mul_epu32((__m512i)odd, (__m512i)factor);
#elif defined(__AVX2__)
        even = (LongRegister)_mm256_mul_epu32((__m256i)even, (__m256i)factor);
        odd = (LongRegister)_mm256_mul_epu32((__m256i)odd, (__m256i)factor);
#elif defined(__SSE2__)
        even = (LongRegister)_mm_mul_epu32((__m128i)even, (__m128i)factor);
        odd = (LongRegister)_mm_mul_epu32((__m128i)odd, (__m128i)factor);
#else
        even = (even & low_half) * factor;
        odd = odd * factor;
#endif
        low.part[i] = (IntRegister)((even & low_half) | (odd << 32));
        high.part[i] = (IntRegister)((even >> 32) | (odd & ~low_half));
    }
}

}  // namespace q2
