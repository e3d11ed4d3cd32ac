// SPDX-License-Identifier: Apache-2.0
// For a bf16 source of rotate_quantize.cu whose nvfp4 block scales are known: rounds its elements in
// shared memory to e2m1. The tile then holds what it would hold for codes: code * scale * 2^-7 in f16,
// with the signs of the rows (tile.cuh).
//
// The global scale is a power of two. So a block's scale, and with it p = scale * global scale, has 4
// significant bits. The reference rounds the fp32 product of x and r = 1/p. Here the product is
// rounded to f16 first, to 13 bits less.
//
// That can change the result only if x/p is half way between two points of the grid. For any other x,
// x/p is at least a relative 2^-8 away from there, since x, and p times the middle, have 8 bits each.
// Half way, the reference goes where the error d of r takes the product (r * p = 1 + d), if d is large
// enough to count in 24 bits. The factor used here has an error of 2^13 d, which counts in f16's 11 bits
// in the same cases. (All x and p: tests/runtime_kernels/cuda/test_rounded_emulated.py.)
#pragma once
#include "tile.cuh"

#if Q2_SOURCE == 7 || Q2_SOURCE == 8
static_assert(!kRows && !kGrouped && kTileCols == 64, "a word holds the scales of a row of a tile");

// By an e4m3 byte, in whose sign bit its row has its sign: what x is multiplied by, and what the codes
// are, two f16.
__shared__ uint2 factors_of_scale[256];

Q2_INLINE void make_factors(const Params& p) {
  float global_scale = p.source_global ? *p.source_global : 1.0f;
  for (int byte = threadIdx.x; byte < 256; byte += kThreads) {
    float scale = from_e4m3(byte & 0x7F), step = fmaxf(scale * global_scale, 0x1p-126f);
    float r = reciprocal(step);
    r = __fmaf_rn(r, 8191.0f * __fmaf_rn(step, r, -1.0f), r);
    u32 two = mul_f16x2(e4m3x2_to_f16x2(byte * 0x101u), 0x20002000u);  // 0x2000: 2^-7
    factors_of_scale[byte] = {byte & 0x7F ? __float_as_uint(r) : 0, two};
  }
}

constexpr int kPiecesOfRow = kRowBytes / 16;         // a thread has one of every
constexpr int kRowsApart = kThreads / kPiecesOfRow;  // so many rows
static_assert(kTileRows / kRowsApart == kPiecesOfRow, "a lane loads the scales of one of its rows");

// The row of a tile whose scales a thread loads: among eight lanes each has one of their rows.
Q2_INLINE int row_of_scales() {
  return threadIdx.x / kPiecesOfRow + threadIdx.x % kPiecesOfRow * kRowsApart;
}

// The four scales of that row, 0 where there are none.
Q2_INLINE u32 fetch_scales(const Params& p, Tile tile, const Rows& rows) {
  int row = row_of_scales(), block = tile.col / kBlock, left = p.source_blocks - block;
  if (row >= rows.count || left <= 0) return 0;
  u32 at = rows.first + row;
  if (kSourceSwizzled)
    return *(const u32*)(p.scales + swizzled_at(at, block, (p.source_blocks + 3) / 4));
  const u8* scales = p.scales + block + mul_wide(at, p.source_blocks);
  if (p.source_blocks % 4 == 0) return *(const u32*)scales;
  u32 word = 0;
  for (int i = 0; i < 4; ++i) word |= i < left ? scales[i] << 8 * i : 0;
  return word;
}

// Two elements to code * scale: those of e2m1.cuh's arithmetic, in f16.
Q2_INLINE u32 round_two(u32 word, float factor, u32 scale) {
  Pair x = signed_bf16x2(word, 0x3F800000u, 0x3F800000u);  // not by the ALU; infinities become NaN, as all does
  u32 y = to_f16x2(fabsf(x.a) * factor, fabsf(x.b) * factor);
  u32 m = max_f16x2(y, 0x3C043C04u);  // 1 + 2^-8
  u32 rounded = fma_f16x2(m, 0x60006000u, fma_f16x2(m, 0xE000E000u, y));  // 512, -512
  rounded = min_f16x2(rounded, 0x46004600u);  // 6: above it lie some of blocks with subnormal scales
  return mul_f16x2(rounded | (word & 0x80008000u), scale);
}

// Rounds in place what this thread has copied into a tile. scales: what it has fetched for it.
Q2_INLINE void round_tile(u32 scales, u8* shared, Places places) {
  u32 signs = kSigned ? masks[0].columnwise[row_of_scales()] : 0;  // bits 15 and 31
  scales ^= signs | signs >> 8;
  int block = threadIdx.x % kPiecesOfRow / 2;
#pragma unroll
  for (int i = 0; i < kPiecesOfRow; ++i) {
    u32 four = __shfl_sync(~0u, scales, i, kPiecesOfRow);
    uint2 factors = factors_of_scale[__byte_perm(four, 0, 0x4440 | block)];
    float factor = __uint_as_float(factors.x);
    uint4* at = (uint4*)(shared + (places.fetched ^ twist(i * kRowsApart)) + i * kRowsApart * kRowBytes);
    uint4 v = *at;
    *at = {round_two(v.x, factor, factors.y), round_two(v.y, factor, factors.y),
           round_two(v.z, factor, factors.y), round_two(v.w, factor, factors.y)};
  }
}
#else
Q2_INLINE void make_factors(const Params&) {}
Q2_INLINE u32 fetch_scales(const Params&, Tile, const Rows&) {
  return 0;
}
Q2_INLINE void round_tile(u32, u8*, Places) {}
#endif
