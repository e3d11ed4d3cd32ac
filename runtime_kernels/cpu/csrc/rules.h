// SPDX-License-Identifier: Apache-2.0
// The rounding rules of numerics/nvfp4.py and numerics/mxfp4.py, for a block in each of sixteen lanes. Every operation is
// one of fp32 that rounds by itself, in the reference's order, or exact.
#pragma once
#include "operand.h"

namespace q2 {

// Eight codes a word, the first in the low bits.
template <int WIDTH>
struct Codes {
    I word[WIDTH / 8];
};

// A rule's results for a block. The scale is raw if the global scale depends on all raw scales.
template <int WIDTH>
struct Block {
    Codes<WIDTH> codes;
    F scale;  // nvfp4: raw, or an e4m3 value; mxfp4: none
    I exponent, poisoned, trusted;
};

// Inputs of the rules besides the elements.
struct Context {
    const Operand& o;
    F global_scale;   // where it is exact
    F inverse_global_scale;
    I index_low, index_high;  // of the Philox block of the first element of the chunk, in each lane
    F factor, share;
    I other_rows;  // of a block of 32 rows, which are two tiles: bits of the largest |x| of the other one
};

template <int WIDTH>
inline F sum_neighbors(F* x) {
    for (int width = WIDTH; width > 1; width /= 2)
        for (int i = 0; i < width / 2; i++) x[i] = x[2 * i] + x[2 * i + 1];
    return x[0];
}

// 22 random bits for eight elements of each lane, those from `group` * 8 on of its chunk: a word serves two.
inline void draw(const Context& c, int group, uint32_t purpose, I random[8]) {
    I low = c.index_low + fill(group);
    I words[4] = {low, c.index_high - below_unsigned(low, c.index_low), fill((int32_t)c.o.rng_offset),
                  fill((int32_t)purpose)};
    philox(words, Key(*c.o.seed), RANDOM_BITS_ROUNDS);
    for (int w = 0; w < 4; w++) {
        random[2 * w] = shift_right(words[w], 10);
        random[2 * w + 1] = ((words[w] & fill(0xFFFF)) << 6) | shift_right(words[w], 26);
    }
}

// For blocks of 16 or 32 rows, of which 16 are the lanes: the maximum, or the sum, of all.
inline I largest_of_lanes(const I& x) {
    int32_t lanes[LANES], largest = 0;
    store(lanes, x);
    for (int i = 0; i < LANES; i++) largest = lanes[i] > largest ? lanes[i] : largest;
    return fill(largest);
}
inline F sum_of_lanes(const F& x) {
    float lanes[LANES];
    store(lanes, x);
    for (int width = LANES; width > 1; width /= 2)
        for (int i = 0; i < width / 2; i++) lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
    return fill(lanes[0]);
}

// max |x| * factor of each block, 0 where it is not finite: it is poisoned then.
template <int WIDTH>
inline F largest_of(const Operand& o, const F* x, const F& factor, I& poisoned, I largest = fill(0)) {
    for (int k = 0; k < WIDTH; k++) largest = most(largest, bits(x[k]) & fill(0x7FFFFFFF));
    if (o.height > 1) largest = largest_of_lanes(largest);
    F scaled = as_float(largest) * factor;
    poisoned = (bits(scaled) & fill(0x7FFFFFFF)) > fill(EXPONENT - 1);
    return select(poisoned, fill(0.0f), scaled);
}

template <int WIDTH, bool RANDOM>
inline Codes<WIDTH> round_block(const Context& c, F* scaled, int first, uint32_t purpose, F* values) {
    Codes<WIDTH> codes;
    for (int w = 0; w < WIDTH / 8; w++) codes.word[w] = fill(0);
    for (int group = 0; group < WIDTH / 8; group++) {
        I random[8];
        if (RANDOM) draw(c, first / 8 + group, purpose, random);
        for (int i = 0; i < 8; i++) {
            int k = 8 * group + i;
            F value = RANDOM ? stochastic_e2m1(scaled[k], random[i]) : round_e2m1(scaled[k]);
            codes.word[k / 8] = codes.word[k / 8] | (encode_e2m1(value) << (k % 8 * 4));
            values[k] = value;
        }
    }
    return codes;
}

// ---- nvfp4 ----

inline F block_scale(const Context& c, const F& largest, float vmax, float inverse_vmax) {
    if (c.o.exact) return nearest_e4m3(largest / fill(vmax) / c.global_scale);
    F scale = keep_4_bits(largest * fill(inverse_vmax));
    return select(scale < fill(TINY), fill(0.0f), scale);
}

inline F reciprocal(const Context& c, const F& scale) {
    if (c.o.exact) return at_most(c.inverse_global_scale / or_one(scale), HUGE_FP32);
    return fill(1.0f) / at_least(scale, TINY);
}

// An exact square, rounded to a multiple of 2^-14.
inline F square_of(const F& x) {
    const float* from = (const float*)&x;
    F r;
    float* to = (float*)&r;
    for (int i = 0; i < LANES; i++) {
        double own = from[i];
        to[i] = (float)((own * own + 274877906944.0) - 274877906944.0);  // 2^38
    }
    return r;
}

// Codes under one scale, and the error of the block in units of it.
template <bool RANDOM, int SELECTION>
inline Codes<16> candidate(const Context& c, const F* x, int first, const F& by, uint32_t purpose, F& error) {
    F scaled[16], values[16];
    F product = at_most(by * c.factor, HUGE_FP32);
    for (int k = 0; k < 16; k++) scaled[k] = x[k] * product;
    Codes<16> codes = round_block<16, RANDOM>(c, scaled, first, purpose, values);
    if (SELECTION == NONE) return codes;
    for (int k = 0; k < 16; k++) values[k] = square_of(scaled[k] - values[k]);
    error = sum_neighbors<16>(values);
    if (c.o.height > 1) error = sum_of_lanes(error);
    return codes;
}

inline Codes<16> choose(const I& where, const Codes<16>& a, const Codes<16>& b) {
    return {{select(where, a.word[0], b.word[0]), select(where, a.word[1], b.word[1])}};
}

inline F ratio_of(const Context& c, const F& scale, const F& first) {
    return c.o.exact ? or_one(scale) / or_one(first) : scale * reciprocal(c, first);
}

// The scale so many e4m3 steps up, where there is one.
inline F stepped(const Context& c, const F& scale, int step) {
    if (!c.o.exact) {
        F other = as_float(bits(scale) + fill(step << 20));
        I exists = (scale > fill(0.0f)) & ~(other < fill(TINY)) & (other == other);
        return select(exists, other, scale);
    }
    alignas(64) float scales[LANES];
    alignas(64) int32_t bytes[LANES];
    store(bytes, encode_e4m3(nearest_e4m3(scale)));
    for (int i = 0; i < LANES; i++) {
        int32_t byte = bytes[i];
        if (byte != 0 && byte < 0x7E && (step > 0 || byte >= 8)) byte = byte + step > 0x7E ? 0x7E : byte + step;
        scales[i] = decode_e4m3((uint8_t)byte);
    }
    return load(scales);
}

template <bool RANDOM, int SELECTION>
inline Block<16> nvfp4(const Context& c, const F* x, int first) {
    const Operand& o = c.o;
    Block<16> b;
    F largest = largest_of<16>(o, x, c.factor, b.poisoned), error;
    F scale = block_scale(c, largest, o.vmax, o.inverse_vmax);
    if (SELECTION == SEARCH) {
        F best = fill(0.0f), of_first = scale;
        for (int s = 0; s < o.step_count; s++) {
            F other = stepped(c, of_first, o.steps[s]), ratio = ratio_of(c, other, of_first);
            Codes<16> codes = candidate<RANDOM, FOUR_SIX>(c, x, first, reciprocal(c, other), RANDOM_BITS, error);
            error = error * (ratio * ratio);
            I better = s == 0 ? fill(-1) : error < best;
            best = select(better, error, best);
            b.codes = s == 0 ? codes : choose(better, codes, b.codes);
            scale = select(better, other, scale);
        }
        b.scale = scale;
        return b;
    }
    b.codes = candidate<RANDOM, SELECTION>(c, x, first, reciprocal(c, scale), RANDOM_BITS, error);
    if (SELECTION != NONE) {
        F four = block_scale(c, largest, o.vmax_four, o.inverse_vmax_four), error_four;
        F ratio = ratio_of(c, four, scale);
        Codes<16> codes =
            candidate<RANDOM, SELECTION>(c, x, first, reciprocal(c, four), SECOND_RANDOM_BITS, error_four);
        I chosen = error_four * (ratio * ratio) < error;
        b.codes = choose(chosen, codes, b.codes);
        scale = select(chosen, four, scale);
    }
    b.scale = scale;
    return b;
}

// Products of fp32 that are not negative, each cut to a multiple of 2^-13, in such units; and their sum.
inline void add_cut(const F& x, const F& y, int32_t sums[LANES]) {
    const float *a = (const float*)&x, *b = (const float*)&y;
    for (int i = 0; i < LANES; i++) sums[i] += (int32_t)((double)a[i] * (double)b[i] * 8192.0);
}

inline Block<16> ms_eden(const Context& c, const F* x, int first) {
    Block<16> b;
    F largest = largest_of<16>(c.o, x, fill(1.0f), b.poisoned);
    F pseudo = keep_4_bits(largest * fill(c.o.inverse_vmax)), scaled[16], values[16];
    pseudo = select(pseudo < fill(TINY), fill(0.0f), pseudo);
    F by = at_most(fill(1.0f) / or_one(pseudo), HUGE_FP32);
    // A poisoned block has no sums.
    for (int k = 0; k < 16; k++) scaled[k] = select(b.poisoned, fill(0.0f), x[k] * by);
    b.codes = round_block<16, false>(c, scaled, first, 0, values);
    alignas(64) int32_t squares[LANES] = {}, projections[LANES] = {};
    for (int k = 0; k < 16; k++) {
        add_cut(scaled[k], values[k], projections);
        add_cut(scaled[k], scaled[k], squares);
    }
    const F cut = fill(1.220703125e-4f);  // 2^-13
    F projection = to_float(load(projections)) * cut;
    F correction = to_float(load(squares)) * cut / or_one(projection);
    correction = select((projection == fill(0.0f)) | b.poisoned, fill(1.0f), correction);
    F corrected = pseudo * correction;
    if (c.o.shares) corrected = corrected * c.share;
    b.scale = corrected * c.factor;
    return b;
}

// ---- mxfp4 ----

template <int ROUNDING>
inline Block<32> mxfp4(const Context& c, const F* x, int first) {
    Block<32> b;
    F largest = largest_of<32>(c.o, x, c.factor, b.poisoned, c.other_rows), scaled[32], values[32];
    I exponent = exponent_of(as_float(bits(largest) + fill(c.o.above))) - fill(2);
    if (ROUNDING == QUEST) {
        I top = most(exponent_of(largest), fill(-126));
        F down = power_of_two(fill(0) - top);
        for (int k = 0; k < 32; k++) {
            F own = x[k] * down;
            values[k] = own * own;
        }
        F mean = sum_neighbors<32>(values) / fill(32.0f);
        I e = exponent_of(mean * fill((float)((2.92247856 / 6.0) * (2.92247856 / 6.0))));
        exponent = top + ((e + fill(1)) >> 1);
    }
    exponent = most(exponent, fill(-127));
    exponent = select(exponent > fill(126), fill(126), exponent);
    F by = at_most(fill(c.o.shrink) * power_of_two(fill(0) - exponent) * c.factor, HUGE_FP32);
    for (int k = 0; k < 32; k++) scaled[k] = x[k] * by;
    b.codes = round_block<32, ROUNDING == MX_STOCHASTIC>(c, scaled, first, RANDOM_BITS, values);
    b.exponent = exponent + fill(127);
    b.trusted = fill(0);
    if (ROUNDING == QUEST)
        for (int k = 0; k < 32; k++) {
            I inside = (magnitude(scaled[k]) < fill(6.0f)) & ~b.poisoned & fill(1);
            b.trusted = b.trusted | (inside << k);
        }
    return b;
}

}  // namespace q2
