// A tile of an operand that is computed in the place of being read (produced.cuh), for tile.cuh.
#pragma once

// Pieces of a row, one of each operand, to their places in the operands' tiles.
Q2_INLINE void put_pieces(u8* to, const uint4 (&made)[kOperands]) {
#pragma unroll
  for (int i = 0; i < kOperands; ++i) *(uint4*)(to + i * kTileBytes) = made[i];
}

// As fetch_elements of tile.cuh, whose place it takes. The loads of kRowsAhead rows are on their way
// together; a thread waits for them, and the other warps of the multiprocessor round meanwhile. All
// columns of a piece exist or none (lowering/producers.py).
Q2_INLINE void fetch_elements(const Params& p, Tile tile, const Rows& rows, u8* shared,
                              Places places) {
  constexpr int kPieces = kRowBytes / 16, kRowStep = kThreads / kPieces;
  int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  u32 target = places.fetched;
  int col = tile.col + piece * kPerPiece;
  if (rows.count >= kTileRows && tile.col + kTileCols <= p.cols) {
#pragma unroll 1
    for (int first = 0; first < kTileRows; first += kRowsAhead * kRowStep) {
      uint4 made[kRowsAhead][kOperands];
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i)
        produce(p.producer, rows.first + row + first + i * kRowStep, col, made[i]);
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        int r = first + i * kRowStep;
        put_pieces(shared + (target ^ twist(r)) + r * kRowBytes, made[i]);
      }
    }
  } else {
#pragma unroll 1
    for (int r = 0; r < kTileRows; r += kRowStep) {
      uint4 made[kOperands] = {};
      if (row + r < rows.count && col < p.cols) produce(p.producer, rows.first + row + r, col, made);
      put_pieces(shared + (target ^ twist(r)) + r * kRowBytes, made);
    }
  }
}

// Has L2 fetch what a tile will be computed from (kPrefetched). A thread: 64 columns of a row.
Q2_INLINE void prefetch_elements(const Params& p, Tile tile) {
  constexpr int kColumns = 64, kAcross = kTileCols / kColumns;
  int row = tile.row + threadIdx.x / kAcross, col = tile.col + threadIdx.x % kAcross * kColumns;
  if (row < p.rows && col < p.cols) prefetch_lines(p.producer, row, col);
}
