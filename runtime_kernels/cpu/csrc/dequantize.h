// SPDX-License-Identifier: Apache-2.0
// Dequantizing, and the backward of QuEST's quantizer.
#pragma once
#include "quantize.h"

namespace q2 {

// kernels.py has the same struct.
struct Quantized {
    const uint8_t* codes;  // [rows, width / 2], contiguous, as all of these
    const uint8_t* scales;
    const float* global_scale;  // or null
    void* out;                  // [rows, columns]
    int64_t rows, width, columns;
    int32_t type, is_mx, height;  // rows that share a scale
};

inline void write(void* out, int32_t type, int64_t at, const F& x, int count) {
    if (type == FP32) {
        std::memcpy((float*)out + at, &x, 4 * count);
        return;
    }
    int32_t words[LANES];
    store(words, type == BF16 ? to_bf16(x) : to_fp16(x));
    uint16_t halves[LANES];
    for (int i = 0; i < LANES; i++) halves[i] = (uint16_t)words[i];
    std::memcpy((uint16_t*)out + at, halves, 2 * count);
}

inline void dequantize(const Quantized& q) {
    const int64_t block = q.is_mx ? 32 : 16, across = q.width / block;
    float scale_of[256];
    for (int i = 0; i < 256; i++) scale_of[i] = q.is_mx ? decode_e8m0((uint8_t)i) : decode_e4m3((uint8_t)i);
    const float global_scale = q.global_scale ? *q.global_scale : 1.0f;
#pragma omp parallel for schedule(static) if (q.rows * q.width > ALONE)
    for (int64_t row = 0; row < q.rows; row++) {
        const uint8_t* codes = q.codes + row * q.width / 2;
        const uint8_t* scales = q.scales + row / q.height * across;
        for (int64_t column = 0; column < q.columns; column += LANES) {
            uint64_t packed;
            std::memcpy(&packed, codes + column / 2, 8);
            int32_t nibbles[LANES];
            for (int i = 0; i < LANES; i++) nibbles[i] = (int32_t)(packed >> 4 * i & 15);
            F x = decode_e2m1(load(nibbles)) * fill(scale_of[scales[column / block]]);
            if (q.global_scale) x = x * fill(global_scale);
            int64_t left = q.columns - column;
            write(q.out, q.type, row * q.columns + column, x, (int)(left < LANES ? left : LANES));
        }
    }
}

// kernels.py has the same struct.
struct Masked {
    const void* grad;     // [rows, width], contiguous, as all of these
    const uint8_t* mask;  // [rows, width / 8]
    void* out;
    int64_t rows, width;
    int32_t type, rotated, signs;
    float norm;
    const int64_t* sign_seed;
};

template <Type TYPE>
inline void masked_unrotate(const Masked& m) {
    float signs[LARGEST_CHUNK];
    if (m.signs) signs_of(*m.sign_seed, signs);
    // Chunks of whole registers: a rotation by 1 is none.
    const int64_t chunk = m.rotated > 1 ? m.rotated : LANES, chunks = m.rows * m.width / chunk;
    const int64_t tail = m.rows * m.width - chunks * chunk;
    const int64_t all = chunks + (tail ? 1 : 0);
#pragma omp parallel for schedule(static) if (m.rows * m.width > ALONE)
    for (int64_t tile = 0; tile < (all + LANES - 1) / LANES; tile++) {
        F x[LARGEST_CHUNK];
        for (int part = 0; part < chunk; part += LANES) {
            F lanes[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                int64_t at = (tile * LANES + lane) * chunk + part, left = m.rows * m.width - at;
                if (left <= 0) {
                    lanes[lane] = fill(0.0f);
                    continue;
                }
                int count = (int)(left < LANES ? left : LANES);
                int32_t trusted[LANES];
                for (int i = 0; i < LANES; i++)
                    trusted[i] = i < count ? -(m.mask[(at + i) / 8] >> (at + i) % 8 & 1) : 0;
                lanes[lane] = select(load(trusted), some<TYPE>(m.grad, at, 1, count), fill(0.0f));
            }
            transpose(lanes, x + part);
        }
        if (m.rotated > 1) hadamard(x, m.rotated);
        for (int k = 0; k < chunk; k++) {
            x[k] = x[k] * fill(m.norm);
            if (m.signs && m.rotated > 1) x[k] = x[k] * fill(signs[k]);
        }
        for (int part = 0; part < chunk; part += LANES) {
            F lanes[LANES];
            transpose(x + part, lanes);
            for (int lane = 0; lane < LANES; lane++) {
                int64_t at = (tile * LANES + lane) * chunk + part, left = m.rows * m.width - at;
                if (left > 0) write(m.out, m.type, at, lanes[lane], (int)(left < LANES ? left : LANES));
            }
        }
    }
}

}  // namespace q2
