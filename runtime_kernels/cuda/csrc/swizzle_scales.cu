// SPDX-License-Identifier: Apache-2.0
// Block scales into the layout that Blackwell's tensor cores read: tiles of 128 rows x 4 blocks
// (numerics/swizzle.py).
//
//   scales  u8 [rows, blocks]; for blocks of 16x16 or 32x32 (row_shift 4, 5) [rows / 16, blocks],
//           each row of them standing for 16 or 32
//   out     u8: scale (row, block) at
//             ((row / 128) * ceil(blocks / 4) + block / 4) * 512
//             + row % 32 * 16 + row % 128 / 32 * 4 + block % 4,
//           zeros where rows and blocks are padded to whole tiles
//
// A thread writes the 4 bytes of one row of a tile. Bytes a scale: 1 read, 1 written.

#include "formats.cuh"

constexpr int kThreads = 256;

struct Params {
  const u8* scales;
  u32* out;
  int rows, blocks, row_shift, tiles_across, words;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in swizzle.py");

extern "C" __global__ void __launch_bounds__(kThreads)
    swizzle_scales(const __grid_constant__ Params p) {
  int word = blockIdx.x * kThreads + threadIdx.x;
  if (word >= p.words) return;
  int tile = word / 128, within = word % 128;
  int row = tile / p.tiles_across * 128 + within / 4 + within % 4 * 32,
      block = tile % p.tiles_across * 4;
  u32 bytes = 0;
  if (row < p.rows) {
    const u8* source = p.scales + (long long)(row >> p.row_shift) * p.blocks + block;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (block + i < p.blocks) bytes |= (u32)source[i] << (8 * i);
  }
  p.out[word] = bytes;
}
