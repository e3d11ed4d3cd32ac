// SPDX-License-Identifier: Apache-2.0
// One call of a quantizer: its arguments, and how chunks of its operand are loaded into sixteen lanes.
#pragma once
#include "formats.h"

namespace q2 {

constexpr int LARGEST_CHUNK = 128;

enum Rounding { NEAREST = 0, STOCHASTIC = 1, MS_EDEN = 2, MX_NEAREST = 3, MX_STOCHASTIC = 4, QUEST = 5 };
enum Selection { NONE = 0, FOUR_SIX = 1, SEARCH = 2 };

// kernels.py has the same struct.
struct Operand {
    // The source: a matrix of rows x columns, which may have to be rounded to given scales first.
    const void* x;
    int64_t rows, columns, row_stride, column_stride;
    const uint8_t* source_scales;  // or null; contiguous, one for 16 columns
    int64_t scales_across;
    // How.
    int32_t type, columnwise, rounding, selection, exact, height, chunk, rotated, signs;
    int32_t above;  // added to the bits of a block's largest, of which MXFP4's scale is the exponent (mxfp4.py)
    uint32_t rng_offset;
    float vmax, vmax_four, inverse_vmax, inverse_vmax_four, cap, amax_divisor, shrink, global_scale_of_mx, factor;
    int32_t steps[8], step_count;
    const int64_t* seed;
    const int64_t* sign_seed;
    const float* factor_tensor;  // or null; of given scales, their global scale
    const float* amax;           // or null
    const float* shares;         // or null, one for each chunk
    // The outputs.
    uint8_t* codes;
    uint8_t* scales;
    float* global_scale;
    uint8_t* mask;  // or null
};

// Where the chunks of sixteen lanes are: in which row of the result, and which chunk of that row.
struct Place {
    int64_t row[LANES], piece[LANES];
    int32_t live;  // lanes that there are; the others hold zeros
};

struct Layout {
    int64_t rows, contraction, pieces, width;  // of the result, width with its padding
    int64_t tiles, lanes_across;

    explicit Layout(const Operand& o) {
        rows = o.columnwise ? o.columns : o.rows;
        contraction = o.columnwise ? o.rows : o.columns;
        pieces = (contraction + o.chunk - 1) / o.chunk;
        width = pieces * o.chunk;
        lanes_across = (rows + LANES - 1) / LANES;
        // Rowwise, neighboring lanes are neighboring chunks, unless rows share scales.
        packed = !o.columnwise && o.height == 1;
        tiles = packed ? (rows * pieces + LANES - 1) / LANES : lanes_across * pieces;
    }

    Place place(int64_t tile) const {
        Place p;
        if (packed) {
            int64_t all = rows * pieces, first = tile * LANES;
            p.live = (int32_t)(all - first < LANES ? all - first : LANES);
            for (int lane = 0; lane < LANES; lane++) {
                p.row[lane] = (first + lane) / pieces;
                p.piece[lane] = (first + lane) % pieces;
            }
            return p;
        }
        int64_t piece = tile / lanes_across, first = tile % lanes_across * LANES;
        p.live = (int32_t)(rows - first < LANES ? rows - first : LANES);
        for (int lane = 0; lane < LANES; lane++) {
            p.row[lane] = first + lane;
            p.piece[lane] = piece;
        }
        return p;
    }

    bool packed;
};

// ---- elements of a matrix ----

inline I words_of(const uint16_t* from) {
    int32_t words[LANES];
    for (int i = 0; i < LANES; i++) words[i] = from[i];
    return load(words);
}
template <Type TYPE>
inline F sixteen(const void* x, int64_t at) {
    if (TYPE == FP32) return load((const float*)x + at);
    return from_bf16(words_of((const uint16_t*)x + at));
}

// `count` elements, `stride` apart; zeros after them.
template <Type TYPE>
inline F some(const void* x, int64_t at, int64_t stride, int count) {
    if (stride == 1 && count == LANES) return sixteen<TYPE>(x, at);
    int32_t words[LANES] = {};
    for (int i = 0; i < count; i++)
        words[i] = TYPE == FP32 ? ((const int32_t*)x)[at + i * stride] : ((const uint16_t*)x)[at + i * stride];
    return TYPE == FP32 ? as_float(load(words)) : from_bf16(load(words));
}

inline void transpose(const F from[LANES], F to[LANES]) {
    alignas(64) float rows[LANES][LANES], columns[LANES][LANES];
    std::memcpy(rows, from, sizeof rows);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) columns[i][j] = rows[j][i];
    std::memcpy(to, columns, sizeof columns);
}

// x rounded to block scales that are given (numerics/scaled_codes.py): e2m1(code) * scale.
inline F by_scales(const Operand& o, const F& x, int64_t row, int64_t column) {
    float scale = decode_e4m3(o.source_scales[row * o.scales_across + column / 16]);
    float step = scale * *o.factor_tensor;
    step = step < TINY ? TINY : step;
    float inverse = scale == 0.0f ? 0.0f : 1.0f / step;
    return round_e2m1(x * fill(inverse)) * fill(scale);
}

template <Type TYPE>
inline F columns_of(const Operand& o, int64_t row, int64_t column, int count) {
    F x = some<TYPE>(o.x, row * o.row_stride + column * o.column_stride, o.column_stride, count);
    return o.source_scales ? by_scales(o, x, row, column) : x;
}

// A chunk of each lane: x[k] holds element k of all.
template <Type TYPE>
inline void load_chunks(const Operand& o, const Place& place, F* x) {
    if (o.columnwise) {
        int64_t first = place.piece[0] * o.chunk;
        for (int k = 0; k < o.chunk; k++)
            x[k] = first + k < o.rows ? columns_of<TYPE>(o, first + k, place.row[0], place.live) : fill(0.0f);
        return;
    }
    for (int part = 0; part < o.chunk; part += LANES) {
        F lanes[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            int64_t column = place.piece[lane] * o.chunk + part, count = o.columns - column;
            count = lane < place.live && count > 0 ? (count < LANES ? count : LANES) : 0;
            lanes[lane] = count ? some<TYPE>(o.x, place.row[lane] * o.row_stride + column * o.column_stride,
                                             o.column_stride, (int)count)
                                : fill(0.0f);
        }
        transpose(lanes, x + part);
    }
}

// ---- the rotation ----

inline void signs_of(int64_t seed, float signs[LARGEST_CHUNK]) {
    I counter[4] = {fill(0), fill(0), fill(0), fill((int32_t)SIGNS)};
    philox(counter, Key(seed), SIGN_ROUNDS);
    for (int j = 0; j < LARGEST_CHUNK; j++) {
        int32_t word[LANES];
        store(word, counter[j / 32]);
        signs[j] = (uint32_t)word[0] >> j % 32 & 1 ? -1.0f : 1.0f;
    }
}

// The transform of `size` elements, in the order of numerics/transforms.py.
inline void hadamard(F* x, int size) {
    for (int h = 1; h < size; h *= 2)
        for (int i = 0; i < size; i += 2 * h)
            for (int j = i; j < i + h; j++) {
                F a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
}

inline void rotate(const Operand& o, const float signs[LARGEST_CHUNK], F* x) {
    if (o.rotated == 1) return;
    for (int first = 0; first < o.chunk; first += o.rotated) {
        F* own = x + first;
        if (o.signs)
            for (int k = 0; k < o.rotated; k++) own[k] = own[k] * fill(signs[k]);
        own[0] = own[0] + fill(0.0f);  // +0 for -0 (numerics/quantize_tiles.py)
        hadamard(own, o.rotated);
    }
}

}  // namespace q2
