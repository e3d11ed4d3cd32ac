// SPDX-License-Identifier: Apache-2.0
// Rows in groups, for rotate_quantize.cu with Q2_GROUPED: numerics/groups.py.
//
// Columnwise the contraction is the padded layout, in which each group begins a tile; so a tile
// has rows of one group alone, and those of no group come after the last. Rowwise nothing is
// grouped: a tile's rows go where they came from, copies once.
//
// One thread looks up the rows of a tile in the ends of the groups and stores them in shared memory, one
// barrier before others fetch the tile and two before they quantize it. There are four places, since warps
// are at most one barrier apart.
#pragma once
#include "tile.cuh"

constexpr bool kSpread = Q2_SPREAD;  // chunks of at most 64 rows are filled with copies

__shared__ Rows looked_up[4];

Q2_INLINE Rows rows_of(const Params& p, Tile tile) {
#if Q2_GROUPED
  int group = 0;  // as many as end before the tile
  for (int end = p.groups; group < end;) {
    int middle = (group + end) / 2;
    if (p.padded_ends[middle] <= tile.row) group = middle + 1;
    else end = middle;
  }
  bool tail = group == p.groups;
  int first = tile.row + (group ? p.ends[group - 1] - p.padded_ends[group - 1] : 0),
      end = tail ? (kRows ? p.rows : 0) : min(p.ends[group], p.rows),
      count = min(max(end - first, 0), kTileRows), shift = 0;
  if (kSpread && !tail) shift = (count <= 64) + (count <= 32) + (count <= 16) + (count <= 8);
  return {first, count, shift, tail};
#else
  return {tile.row, p.rows - tile.row, 0, false};
#endif
}

// Has a thread of one warp in turn look up tile number `iteration` of this thread block.
Q2_INLINE void look_up(const Params& p, Tile tile, u32 iteration) {
  if (kGrouped && threadIdx.x == iteration % (kThreads / 32) * 32) looked_up[iteration % 4] = rows_of(p, tile);
}

// The rows that were looked up, behind a barrier.
Q2_INLINE Rows rows_now(const Params& p, Tile tile, u32 iteration) {
  return kGrouped ? looked_up[iteration % 4] : rows_of(p, tile);
}

// Where row j of a tile goes rowwise; out.rows where there is none, or a copy.
Q2_INLINE int row_of_result(const Output& out, const Rows& rows, int j) {
  if constexpr (!kGrouped) return rows.first + j;
  else return rows.has(j) && !(j & ((1 << rows.shift) - 1)) ? rows.at(j) : out.rows;
}

// The factor of a row's copies. MS-EDEN applies it to the raw scales of their blocks.
Q2_INLINE float share_of(const Rows& rows) {
  int s = rows.shift;
  return s == 1 ? 0x1.6a09e6p-1f : s == 2 ? 0.5f : s == 3 ? 0x1.6a09e6p-2f : 1.0f;
}
