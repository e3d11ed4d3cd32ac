// SPDX-License-Identifier: Apache-2.0
// Dequantizing.
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
    store(words, to_bf16(x));
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

}  // namespace q2
