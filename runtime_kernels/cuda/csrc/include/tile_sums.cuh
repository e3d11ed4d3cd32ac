// SPDX-License-Identifier: Apache-2.0
// dbias of a tile: the sum of each column, computed by rotate_quantize.cu with the columnwise operand
// (Q2_SUMS); sums.cuh adds up those of all tiles. Order of operations: numerics/column_sums.py.
#pragma once
#include "tile.cuh"

// Adds two rows of a column, which a word holds before it gets its signs.
Q2_INLINE void add_two_to_sum(float& sum, u32 word) {
  sum = kSource == BF16 ? plus_bf16x2(sum, word) : plus_f16x2(sum, word);
}

// Adds eight rows of a column, from row `row` of a tile on, without their signs.
Q2_INLINE void add_to_sum([[maybe_unused]] float& sum, [[maybe_unused]] const float* y,
                          [[maybe_unused]] int row) {
#if Q2_SUMS
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    float4 s = kSigned ? *(const float4*)(masks[0].signs + row + i) : float4{1, 1, 1, 1};
    sum = __fmaf_rn(y[i], s.x, sum);
    sum = __fmaf_rn(y[i + 1], s.y, sum);
    sum = __fmaf_rn(y[i + 2], s.z, sum);
    sum = __fmaf_rn(y[i + 3], s.w, sum);
  }
#endif
}

// The sums of a tile's columns, of which a lane has that of its own half.
Q2_INLINE void store_sums([[maybe_unused]] const Params& p, [[maybe_unused]] Tile tile,
                          [[maybe_unused]] float sum) {
#if Q2_SUMS
  sum += __shfl_xor_sync(~0u, sum, 1);
  long long row = tile.row / kTileRows;
  float* to = p.sums + row * (p.tiles_across * kTileCols) + tile.col;
  if (threadIdx.x % 2 == 0) to[column_of_lane()] = sum;
#endif
}
