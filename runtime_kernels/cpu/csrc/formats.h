// SPDX-License-Identifier: Apache-2.0
// The small formats and Philox, as numerics/formats.py and numerics/philox.py define them.
#pragma once
#include "lanes.h"

namespace q2 {

constexpr int32_t EXPONENT = 0x7F800000;
constexpr float TINY = 1.17549435e-38f, HUGE_FP32 = 3.40282347e38f, E4M3_MAX = 448.0f;
constexpr uint32_t SIGNS = 1, RANDOM_BITS = 2, SECOND_RANDOM_BITS = 3;
constexpr int SIGN_ROUNDS = 10, RANDOM_BITS_ROUNDS = 7;
constexpr uint8_t E4M3_NAN = 0x7F, E8M0_NAN = 0xFF;

// ---- e2m1 ----

inline F round_e2m1(const F& x) {
    I binade = most(bits(x) & fill(EXPONENT), fill(127 << 23));
    F magic = as_float(binade + fill((22 << 23) + 0x400000));
    return copy_sign(at_least(at_most((x + magic) - magic, 6.0f), -6.0f), x);
}

// The code of an e2m1 value: bits >> 22 of 1, 1.5, 2, 3, 4, 6 are 254 to 259.
inline I encode_e2m1(const F& value) {
    I all = bits(value), size = all & fill(0x7FFFFFFF);
    I code = most((size >> 22) - fill(252), (size > fill(0)) & fill(1));
    return select(code > fill(7), fill(7), code) | (shift_right(all, 31) << 3);
}

inline F decode_e2m1(const I& code) {
    I index = code & fill(7);
    I normal = (index + fill(252)) << 22;
    I subnormal = (fill(0) - index) & fill(0x3F000000);  // 0 or .5
    return as_float(select(index > fill(1), normal, subnormal) | ((code & fill(8)) << 28));
}

// Up with the probability of the distance from the value below; random: 22 bits, which are added to the
// fraction of a step and carry into the code.
inline F stochastic_e2m1(const F& x, const I& random) {
    F size = at_most(magnitude(x), 6.0f);
    I small = bits(size + fill(1.0f)) - fill(127 << 23);
    I position = select(size < fill(1.0f), small, bits(size) - fill(126 << 23));
    return copy_sign(decode_e2m1((position + random) >> 22), x);
}

// The same of x >= 0 or NaN on e4m3's grid, as fp32; random: 32 bits.
inline F stochastic_e4m3(const F& scale, const I& random) {
    F x = at_most(scale, E4M3_MAX);
    I binade = most(bits(x) & fill(EXPONENT), fill((127 - 6) << 23));
    F step = as_float(binade - fill(3 << 23));
    F position = x / step;
    F below = to_float(to_int(position));
    // 24 of the 32 bits of a fraction can be set: it is compared as the number of them that int32 holds.
    F scaled = (position - below) * fill(65536.0f);
    I high = to_int(scaled), low = to_int((scaled - to_float(high)) * fill(65536.0f));
    I up = below_unsigned(random, (high << 16) | low);
    F rounded = (below + to_float(up & fill(1))) * step;
    return select(x == x, rounded, x);
}

// ---- e4m3, of x >= 0 or NaN ----

inline F nearest_e4m3(const F& x) {  // as fp32
    F capped = at_most(x, E4M3_MAX);
    I own = bits(capped);
    F normal = as_float((own + fill(0x7FFFF) + ((own >> 20) & fill(1))) & fill((int32_t)0xFFF00000));
    F subnormal = (capped + fill(16384.0f)) - fill(16384.0f);
    F rounded = select(capped < fill(0.015625f), subnormal, normal);
    return select(capped == capped, rounded, capped);
}

inline I encode_e4m3(const F& value) {  // of e4m3 values
    I normal = (bits(value) >> 20) - fill(960);
    I subnormal = bits(value + fill(16384.0f)) & fill(0xFF);
    I byte = select(value < fill(0.015625f), subnormal, normal);
    return select(value == value, byte, fill((int32_t)E4M3_NAN));
}

inline float decode_e4m3(uint8_t byte) {
    if ((byte & 0x7F) == 0x7F) return __builtin_nanf("");
    int32_t exponent = byte >> 3, mantissa = byte & 7;
    if (exponent == 0) return mantissa * 0.001953125f;
    int32_t own = (exponent + 120) << 23 | mantissa << 20;
    float value;
    std::memcpy(&value, &own, 4);
    return value;
}

inline float decode_e8m0(uint8_t byte) {
    if (byte == E8M0_NAN) return __builtin_nanf("");
    int32_t own = byte ? byte << 23 : 0x00400000;
    float value;
    std::memcpy(&value, &own, 4);
    return value;
}

// ---- fp32 ----

// x >= 0 to 4 significant bits, ties to even.
inline F keep_4_bits(const F& x) {
    I own = bits(x);
    return as_float((own + fill(0x7FFFF) + ((own >> 20) & fill(1))) & fill((int32_t)0xFFF00000));
}
inline I exponent_of(const F& x) { return (bits(x) >> 23) - fill(127); }
inline F power_of_two(const I& exponent) { return as_float((exponent + fill(127)) << 23); }

// ---- bf16; torch converts fp16 from fp32 and to it ----

enum Type { BF16 = 0, FP32 = 1 };

inline F from_bf16(const I& word) { return as_float(word << 16); }
inline I to_bf16(const F& x) {
    I own = bits(x);
    I rounded = shift_right(own + fill(0x7FFF) + (shift_right(own, 16) & fill(1)), 16);
    return select(x == x, rounded, fill(0x7FC0));
}

// ---- Philox4x32, of 10 rounds for signs and 7 for random bits ----

struct Key {
    uint32_t low, high;
    explicit Key(int64_t seed) : low((uint32_t)seed), high((uint32_t)((uint64_t)seed >> 32)) {}
};

inline void philox(I counter[4], Key key, int rounds) {
    for (int round = 0; round < rounds; round++) {
        I high0, low0, high1, low1;
        multiply(counter[0], 0xD2511F53u, high0, low0);
        multiply(counter[2], 0xCD9E8D57u, high1, low1);
        counter[0] = high1 ^ counter[1] ^ fill((int32_t)key.low);
        counter[1] = low1;
        counter[2] = high0 ^ counter[3] ^ fill((int32_t)key.high);
        counter[3] = low0;
        key.low += 0x9E3779B9u;
        key.high += 0xBB67AE85u;
    }
}

}  // namespace q2
