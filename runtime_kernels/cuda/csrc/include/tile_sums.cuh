// SPDX-License-Identifier: Apache-2.0
// dbias of a tile: the sum of each column, computed by rotate_quantize.cu with the columnwise operand
// (Q2_SUMS); sums.cuh adds up those of all tiles. Order of operations: numerics/column_sums.py.
#pragma once
#include "tile.cuh"

// Adds what a lane has of two columns, from row `row` of a tile on, without its signs.
Q2_INLINE void add_to_sum([[maybe_unused]] Pair& sum, [[maybe_unused]] const Pair (&x)[16],
                          [[maybe_unused]] int row) {
#if Q2_SUMS
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    float4 s = kSigned ? *(const float4*)(masks[0].signs + row + i) : float4{1, 1, 1, 1};
    sum = fma(x[i], both(s.x), sum);
    sum = fma(x[i + 1], both(s.y), sum);
    sum = fma(x[i + 2], both(s.z), sum);
    sum = fma(x[i + 3], both(s.w), sum);
  }
#endif
}

// The sums of a tile's columns, of which a lane has those of its pair over its own rows.
Q2_INLINE void store_sums([[maybe_unused]] const Params& p, Tile tile, Pair sum) {
#if Q2_SUMS
  sum = add(sum, from_lane(sum, kQuartersApart));
  sum = add(sum, from_lane(sum, 2 * kQuartersApart));
  auto [pair, quarter] = lane_columnwise();
  long long row = tile.row / kTileRows;
  float* to = p.sums + row * (p.tiles_across * kTileCols) + tile.col + threadIdx.x / 32 * 16;
  if (quarter == 0) to[place_of_column(pair, 0)] = sum.a, to[place_of_column(pair, 1)] = sum.b;
#endif
}
