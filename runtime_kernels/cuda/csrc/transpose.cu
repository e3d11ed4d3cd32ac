// SPDX-License-Identifier: Apache-2.0
// q2::transpose: transposes codes of 16x16 blocks (Q2_SIDE 32: of 32x32) and their scales, so that the
// contraction is the other dimension.
//
//   codes   u8 [M, Kp/2], even element in the low nibble        scales  u8 [ceil(M/16), Kp/16]
//   out     u8 [rows, Mp/2], rows <= Kp, Mp = M in whole blocks, zeros where M ends
//   scales  u8 [ceil(rows/16), Mp/16]; Q2_SWIZZLED: one for each row of the result, in the 32x4x4
//           layout (numerics/swizzle.py), with zeros to the end of the last tiles
//
// A thread block transposes a tile of 128x128 codes, by words of eight codes in shared memory. Word k of
// row m is at place k ^ m / 8 of its row, so that threads that read a column of words have few bank
// conflicts. A thread transposes a square of 8x8 codes, which is eight words: it exchanges halves, then
// bytes, then nibbles. 16 neighboring threads read and write 64 bytes of a row.
// Bytes an element: .504 read and .504 written (Q2_SWIZZLED: .563 written).

#include "formats.cuh"

constexpr int kThreads = 256, kTile = 128, kWords = kTile / 8;
constexpr int kSide = Q2_SIDE;  // of a block

struct Params {
  const u32* codes;
  const u8* scales;
  u32* out;
  u8* out_scales;
  int height, words;       // of codes: M, and eights of codes in a row
  int rows, out_words;     // of the result
  int tiles_across;        // of the codes, up to `rows` columns
  int scales_across, blocks;  // scales in a row: of the codes, of the result
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in other_ops.py");

// Bit 2 of row and column change places, then bits 1, then bits 0.
Q2_INLINE void turn(u32 (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 a = x[i], b = x[i + 4];
    x[i] = (a & 0xFFFFu) | b << 16;
    x[i + 4] = a >> 16 | (b & 0xFFFF0000u);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i & 2) continue;
    u32 a = x[i], b = x[i + 2];
    x[i] = (a & 0x00FF00FFu) | (b & 0x00FF00FFu) << 8;
    x[i + 2] = (a >> 8 & 0x00FF00FFu) | (b & 0xFF00FF00u);
  }
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    u32 a = x[i], b = x[i + 1];
    x[i] = (a & 0x0F0F0F0Fu) | (b & 0x0F0F0F0Fu) << 4;
    x[i + 1] = (a >> 4 & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
  }
}

Q2_INLINE u32 scale_at(const Params& p, int block_row, int block_column) {
  return p.scales[(long long)block_row * p.scales_across + block_column];
}

// top, left: of the tile in the codes.
Q2_INLINE void turn_scales(const Params& p, int top, int left) {
  int thread = threadIdx.x;
#if Q2_SWIZZLED
  // A thread makes the four bytes of one row of the result in one of two tiles (blocks of 32: in one).
  int row = left + thread % 128 / 4 + thread % 4 * 32, block = top / kSide + thread / 128 * 4;
  if (thread / 128 * 4 >= kTile / kSide) return;
  int across = (p.blocks + 3) / 4;
  if (block / 4 >= across) return;
  u32 bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (row < p.rows && block + i < p.blocks) bytes |= scale_at(p, block + i, row / kSide) << (8 * i);
  *(u32*)(p.out_scales + swizzled_at(row, block, across)) = bytes;
#else
  constexpr int kAcross = kTile / kSide;
  int row = left / kSide + thread / kAcross, block = top / kSide + thread % kAcross;
  if (thread < kAcross * kAcross && kSide * row < p.rows && block < p.blocks)
    p.out_scales[(long long)row * p.blocks + block] = (u8)scale_at(p, block, row);
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads) transpose(const __grid_constant__ Params p) {
  __shared__ u32 tile[kTile * kWords];
  int thread = threadIdx.x;
  int top = blockIdx.x / p.tiles_across * kTile, left = blockIdx.x % p.tiles_across * kTile;
#pragma unroll
  for (int i = thread; i < kTile * kWords; i += kThreads) {
    int row = i / kWords, word = i % kWords;
    bool inside = top + row < p.height && left / 8 + word < p.words;
    tile[row * kWords + (word ^ row / 8)] =
        inside ? p.codes[(long long)(top + row) * p.words + left / 8 + word] : 0;
  }
  turn_scales(p, top, left);
  __syncthreads();
  int word = thread / kWords, eight = thread % kWords;  // eight columns of the tile, eight rows
  u32 square[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) square[i] = tile[(8 * eight + i) * kWords + (word ^ eight)];
  turn(square);
  if (top / 8 + eight >= p.out_words) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int row = left + 8 * word + i;
    if (row < p.rows) p.out[(long long)row * p.out_words + top / 8 + eight] = square[i];
  }
}
