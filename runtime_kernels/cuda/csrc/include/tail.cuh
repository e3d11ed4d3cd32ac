// SPDX-License-Identifier: Apache-2.0
// Tiles behind the last group, for rotate_quantize.cu with Q2_GROUPED (groups.cuh).
#pragma once
#include "rounding.cuh"

// Columnwise, rows of no group are zeros. They are not rotated: rotation would make some of them -0.
Q2_INLINE void store_zeros_columnwise(const Output& out, Tile tile, const Common& common) {
  constexpr int kOfElements = kTileRows / (kCodes ? 32 : 8);  // 16-byte pieces of a column
  constexpr int kOfScales = kRawScales ? 2 : (kCodes ? 1 : 0), kPieces = kOfElements + kOfScales;
  if constexpr (kRule == AMAX) return;
  for (int i = threadIdx.x; i < kTileCols * kPieces; i += kThreads) {
    int row = tile.col + i / kPieces, piece = i % kPieces;
    if (row >= out.rows) break;
    long long at = (long long)row * out.blocks + tile.row / kBlock;
    u8 *codes = out.codes + at * (kCodes ? 8 : 32), *scales = (u8*)out.scales;
    if (piece < kOfElements) {
      *(uint4*)(codes + 16 * piece) = {0, 0, 0, 0};
    } else if constexpr (kRawScales) {
      *(uint4*)(scales + 4 * at + 16 * (piece - kOfElements)) = {0, 0, 0, 0};
    } else if constexpr (kRule == EXACT) {
      u32 four = common.global_scale == common.global_scale ? 0 : 0x7F7F7F7Fu;  // NaN
      *(uint2*)(scales + at) = {four, four};
    } else {
      *(u32*)(scales + at / 2) = 0;
    }
  }
}
