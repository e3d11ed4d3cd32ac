// SPDX-License-Identifier: Apache-2.0
// Fills a tile by a prologue expression (prologue.cuh) instead of copying it, for tile.cuh.
#pragma once

// Pieces of a row, one of each operand, to their places in the operands' tiles.
Q2_INLINE void put_pieces(u8* to, const uint4 (&made)[kOperands]) {
#pragma unroll
  for (int i = 0; i < kOperands; ++i) *(uint4*)(to + i * kTileBytes) = made[i];
}

// The rows of a whole tile, of which the loads of kRowsAhead are in flight at once.
Q2_INLINE void fetch_rows(const Params& p, const Rows& rows, int col, u8* shared, u32 target) {
  constexpr int kRowStep = kThreads / (kRowBytes / 16);
  int row = threadIdx.x / (kRowBytes / 16);
#pragma unroll 1
  for (int first = 0; first < kTileRows; first += kRowsAhead * kRowStep) {
    uint4 made[kRowsAhead][kOperands];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
      evaluate(p.prologue, rows.first + row + first + i * kRowStep, col, made[i]);
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      int r = first + i * kRowStep;
      put_pieces(shared + (target ^ twist(r)) + r * kRowBytes, made[i]);
    }
  }
}

// Replaces fetch_elements of tile.cuh. A thread waits for its loads, and the other warps of the
// multiprocessor round in the meantime. Either all columns of a piece exist or none does
// (lowering/prologue/expressions.py).
Q2_INLINE void fetch_elements(const Params& p, Tile tile, const Rows& rows, u8* shared,
                              Places places) {
  constexpr int kPieces = kRowBytes / 16, kRowStep = kThreads / kPieces;
  int col = tile.col + threadIdx.x % kPieces * kPerPiece;
  if (rows.count >= kTileRows && tile.col + kTileCols <= p.cols) {
    fetch_rows(p, rows, col, shared, places.fetched);
  } else {
    int row = threadIdx.x / kPieces;
#pragma unroll 1
    for (int r = 0; r < kTileRows; r += kRowStep) {
      uint4 made[kOperands] = {};
      if (row + r < rows.count && col < p.cols)
        evaluate(p.prologue, rows.first + row + r, col, made);
      put_pieces(shared + (places.fetched ^ twist(r)) + r * kRowBytes, made);
    }
  }
}
