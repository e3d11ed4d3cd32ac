// SPDX-License-Identifier: Apache-2.0
// Sums of columns, in the order of numerics/column_sums.py.
#pragma once
#include "dequantize.h"

namespace q2 {

constexpr int64_t DBIAS_TILE = 128, STRANDS = 8, DBIAS_LANES = 4, RUN = 16;

// kernels.py has the same struct.
struct Dbias {
    const void* x;
    void* out;  // [columns]
    int64_t rows, columns, row_stride, column_stride;
    int32_t type, out_type;
};

template <Type TYPE>
inline F sum_of_tile(const Dbias& s, int64_t first_row, int64_t column, int count) {
    F lanes[DBIAS_LANES];
    for (F& lane : lanes) lane = fill(0.0f);
    for (int64_t half = 0; half < DBIAS_TILE / (DBIAS_LANES * RUN); half++)
        for (int64_t i = 0; i < RUN; i++)
            for (int64_t lane = 0; lane < DBIAS_LANES; lane++) {
                int64_t row = first_row + (half * DBIAS_LANES + lane) * RUN + i;
                lanes[lane] = lanes[lane] + (row < s.rows ? some<TYPE>(s.x, row * s.row_stride + column * s.column_stride,
                                                                       s.column_stride, count)
                                                          : fill(0.0f));
            }
    return (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
}

template <Type TYPE>
inline void sum_columns(const Dbias& s) {
    int64_t tiles = (s.rows + DBIAS_TILE - 1) / DBIAS_TILE, rounds = (tiles + STRANDS - 1) / STRANDS;
#pragma omp parallel for schedule(static) if (s.rows * s.columns > ALONE)
    for (int64_t column = 0; column < s.columns; column += LANES) {
        int count = (int)(s.columns - column < LANES ? s.columns - column : LANES);
        F strands[STRANDS];
        for (F& strand : strands) strand = fill(0.0f);
        for (int64_t tile = 0; tile < rounds * STRANDS; tile++) {
            F own = tile < tiles ? sum_of_tile<TYPE>(s, tile * DBIAS_TILE, column, count) : fill(0.0f);
            strands[tile % STRANDS] = strands[tile % STRANDS] + own;
        }
        F total = strands[0];
        for (int64_t strand = 1; strand < STRANDS; strand++) total = total + strands[strand];
        write(s.out, s.out_type, column, total, count);
    }
}

inline void column_sums(const Dbias& s) {
    switch (s.type) {
        case BF16: return sum_columns<BF16>(s);
        case FP16: return sum_columns<FP16>(s);
        default: return sum_columns<FP32>(s);
    }
}

}  // namespace q2
