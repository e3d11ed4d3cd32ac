// SPDX-License-Identifier: Apache-2.0
// The rotation of a tile of codes by tensor cores, for rotate_quantize.cu: H of +-1 times f16.
//
// They add in an order of their own and cut what does not fit, so that they have the reference's bits
// only where all sums are exact. What a chunk holds is e2m1 * e4m3: with s the least scale that is not
// 0, multiples of a sixteenth of the power of two in s, whose sums are at most 128 * 6 * S for the
// largest S. While S is not above 2^8 s they have 23 bits, of the 24 that fit. The scales of a warp's 16
// columns tell; sums of others are added in the reference's order. A sum that is 0 is +0 in either.
//
// A lane gets whole blocks, with no exchange: columns 2 t and 2 t + 1 of a product, which are a lane's,
// are two elements of block t, and each of four products has two others.
#pragma once
#include "groups.cuh"

constexpr int kWarps = kThreads / 32;
static_assert(!kMultiplied || (kTileBlocks == 4 && kWarps == 4), "a warp has a block of each row");

// Of the scales of 16 columns what each warp has seen, of a tile and the next one.
__shared__ uint4 seen_scales[2][kMultiplied ? kTileBlocks : 1];

// For e4m3 bytes: the largest less 1, and 2^16 less the smallest, but for zeros; both are maxima.
Q2_INLINE u32 extent_of_scale(u32 byte) {
  return byte * 0xFFFFu;
}

Q2_INLINE void note_extent(u32 extent, u32 turn) {
  u32* of = (u32*)seen_scales[turn % 2];
  if (threadIdx.x % 32 < kTileBlocks) of[threadIdx.x % 32 * kWarps + threadIdx.x / 32] = extent;
}

// Of a thread's share of codes, which are of the same 16 columns as those of every fourth lane.
Q2_INLINE void note_scales(const Share& share, u32 turn) {
  u32 extent = extent_of_scale(share.scales[0]);
#pragma unroll
  for (int s = 1; s < kShare; ++s) extent = max_u16x2(extent, extent_of_scale(share.scales[s]));
#pragma unroll
  for (int mask = kTileBlocks; mask < 32; mask *= 2)
    extent = max_u16x2(extent, __shfl_xor_sync(~0u, extent, mask));
  note_extent(extent, turn);
}

// kRounded: of a row's four scales; all columns count as one.
Q2_INLINE void note_scales(u32 scales, u32 turn) {
  u32 extent = extent_of_scale(scales & 0xFF);
#pragma unroll
  for (int i = 1; i < 4; ++i)
    extent = max_u16x2(extent, extent_of_scale(__byte_perm(scales, 0, 0x4440 + i)));
  u32 least = __reduce_max_sync(~0u, extent & 0xFFFF);
  note_extent(__reduce_max_sync(~0u, extent >> 16) << 16 | least, turn);
}

// Behind the barrier: whether all sums of this warp's columns are exact. NaN is none.
Q2_INLINE bool sums_are_exact(u32 turn) {
  uint4 of = seen_scales[turn % 2][threadIdx.x / 32];
  u32 extent = max_u16x2(max_u16x2(of.x, of.y), max_u16x2(of.z, of.w));
  return (extent >> 16) < 0x7E && (extent >> 16) + (extent & 0xFFFF) <= 0xFFFF + 8 * 8;
}

// Of the elements of a chunk, as two of f16, what a lane gives to products: H's for elements 2 t and the
// next of eight, of n % 2 + 2 j of the eight that come of them. n is lane / 4.
Q2_INLINE u32 hadamard_word(int j) {
  int lane = threadIdx.x % 32;
  u32 odd = lane >> 2 & 1, t = lane % 4;
  return 0x3C003C00u ^ odd << 31 ^ (__popc(j & t) & 1) * 0x80008000u;
}

// Signs of what block b of four adds to the blocks n / 2 of a chunk: 0 or those of two f16. Of chunks of
// one or two blocks: keeps is 0 where it adds nothing.
Q2_INLINE u32 signs_of_block(int b) {
  int to = threadIdx.x % 32 / 8;
  return (__popc(to & b & (kSize / 16 - 1)) & 1) * 0x80008000u;
}
Q2_INLINE u32 keeps(int b) {
  int to = threadIdx.x % 32 / 8;
  return kSize >= 64 || to / (kSize / 16) == b / (kSize / 16) ? ~0u : 0;
}

// Butterflies between x and y.
Q2_INLINE void butterfly(Pair& x, Pair& y) {
  Pair a = x, b = y;
  x = add(a, b);
  y = sub(a, b);
}

// What a lane has along columns, rotated: blocks t and t + 4 (x[0], x[1]) of columns lane / 4 and 8
// more of a warp's 16, as they lie in the tile. place: where a lane's row of four matrices of 8x8 lies:
// eight rows of the tile, the next 8 columns of those, then the same of the next eight rows.
Q2_INLINE void rotated_by_products(const u8* shared, u32 place, Pair (&x)[2][16]) {
  Pair z[2][2][4][2];  // of blocks from 4 i on, halves of their rows, products, columns
#pragma unroll
  for (int i = 0; i < 32; ++i) z[i / 16][i / 8 % 2][i / 2 % 4][i % 2] = both(0.0f);
  u32 h[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) h[j] = hadamard_word(j);
#pragma unroll
  for (int b = 0; b < 4; ++b) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 rows[4];
      int row = 64 * i + 16 * b;
      load_transposed(shared + (place ^ twist(row)) + row * kRowBytes, rows);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        u32 word = (h[j] ^ signs_of_block(b)) & keeps(b);
        multiply_f16(rows[0], rows[1], word, z[i][0][j]);
        multiply_f16(rows[2], rows[3], word, z[i][1][j]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) butterfly(z[i / 8][0][i / 2 % 4][i % 2], z[i / 8][1][i / 2 % 4][i % 2]);
#pragma unroll
  for (int i = 0; i < 16 && kSize > 64; ++i)
    butterfly(z[0][i / 8][i / 2 % 4][i % 2], z[1][i / 8][i / 2 % 4][i % 2]);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const Pair(&of)[2] = z[i / 8][i / 4 % 2][i % 4];
    Pair(&to)[16] = x[i / 8];
    int at = 8 * (i / 4 % 2) + 2 * (i % 4);
    element(to, 0, at) = of[0].a, element(to, 0, at + 1) = of[0].b;
    element(to, 1, at) = of[1].a, element(to, 1, at + 1) = of[1].b;
  }
}
