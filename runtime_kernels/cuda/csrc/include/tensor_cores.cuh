// SPDX-License-Identifier: Apache-2.0
// Rotates a tile of codes by tensor cores, for rotate_quantize.cu: products of f16 with H, which is +-1.
//
// Tensor cores add in an order of their own and truncate. So their results have the reference's bits only
// where all sums are exact. The elements of a chunk are e2m1 * e4m3. Let s be its smallest scale above 0,
// and S its largest. Elements are then multiples of 1/16 of the power of two in s, and sums are at most
// 128 * 6 * S. If S <= 2^8 s, sums need 23 bits, and 24 fit. Each warp compares the scales of its 16 columns.
// Where their range is wider, sums are added in the reference's order. A sum that is 0 is +0 in either way.
//
// A lane gets whole blocks without an exchange: its columns 2 t and 2 t + 1 of a product are two elements
// of block t.
#pragma once
#include "groups.cuh"
#include "lines.cuh"

constexpr int kWarps = kThreads / 32;
static_assert(!kTensorCores || (kTileBlocks == 4 && kWarps == 4), "a warp has a block of each row");

// The range of the scales of 16 columns that each warp has seen, for a tile and the next one.
__shared__ uint4 seen_scales[2][kTensorCores ? kTileBlocks : 1];

// For e4m3 bytes: the largest less 1, and 2^16 less the smallest, but for zeros; both are maxima.
Q2_INLINE u32 extent_of_scale(u32 byte) {
  return byte * 0xFFFFu;
}

Q2_INLINE void note_extent(u32 extent, u32 iteration) {
  u32* of = (u32*)seen_scales[iteration % 2];
  if (threadIdx.x % 32 < kTileBlocks) of[threadIdx.x % 32 * kWarps + threadIdx.x / 32] = extent;
}

// Notes the scales of a thread's share of codes. Every fourth lane has the same 16 columns.
Q2_INLINE void note_scales(const Share& share, u32 iteration) {
  u32 extent = extent_of_scale(share.scales[0]);
#pragma unroll
  for (int s = 1; s < kShare; ++s) extent = max_u16x2(extent, extent_of_scale(share.scales[s]));
#pragma unroll
  for (int mask = kTileBlocks; mask < 32; mask *= 2)
    extent = max_u16x2(extent, __shfl_xor_sync(~0u, extent, mask));
  note_extent(extent, iteration);
}

// kRounded: of a row's four scales; all columns count as one.
Q2_INLINE void note_scales(u32 scales, u32 iteration) {
  u32 extent = extent_of_scale(scales & 0xFF);
#pragma unroll
  for (int i = 1; i < 4; ++i)
    extent = max_u16x2(extent, extent_of_scale(__byte_perm(scales, 0, 0x4440 + i)));
  u32 least = __reduce_max_sync(~0u, extent & 0xFFFF);
  note_extent(__reduce_max_sync(~0u, extent >> 16) << 16 | least, iteration);
}

// Behind the barrier: whether all sums of this warp's columns are exact. NaN is none.
Q2_INLINE bool sums_are_exact(u32 iteration) {
  uint4 of = seen_scales[iteration % 2][threadIdx.x / 32];
  u32 extent = max_u16x2(max_u16x2(of.x, of.y), max_u16x2(of.z, of.w));
  return (extent >> 16) < 0x7E && (extent >> 16) + (extent & 0xFFFF) <= 0xFFFF + 8 * 8;
}

// A lane's part of the products' right side: the signs of H, as two f16, between rows 2 t and 2 t + 1
// of the left side's first eight and column lane / 4. Row r is element r % 2 of block r / 2, column n
// likewise. A chunk of one or two blocks gets nothing of the others.
Q2_INLINE u32 hadamard_word() {
  constexpr int kBlocks = kSize < 64 ? kSize / 16 : 4;  // that are rotated with one another
  int of = threadIdx.x % 4, to = threadIdx.x % 32 / 8;
  u32 odd = threadIdx.x >> 2 & 1;
  u32 word = 0x3C003C00u ^ odd << 31 ^ (__popc(to & of & (kBlocks - 1)) & 1) * 0x80008000u;
  return to / kBlocks == of / kBlocks ? word : 0;
}

// Butterflies between x and y.
Q2_INLINE void butterfly(Pair& x, Pair& y) {
  Pair a = x, b = y;
  x = add(a, b);
  y = sub(a, b);
}

// A lane's columnwise elements, rotated: blocks t and t + 4 (x[0], x[1]) of columns lane / 4 and 8
// more of a warp's 16, as they lie in the tile. place: where a lane's row of four matrices of 8x8 lies
// (place_of_matrices). Products sum over four elements of each of four blocks, those that differ in the
// two lowest bits of their places, and adders over the rest.
Q2_INLINE void rotated_by_products(const u8* shared, u32 place, Pair (&x)[2][16]) {
  Pair z[2][4][2][2];  // of blocks from 4 i on, elements from 4 q on, of these from 2 j on: two columns
  const u32 word = hadamard_word();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      u32 rows[4];
      int row = 64 * i + 4 * q;
      load_transposed(shared + (place ^ twist(row)) + row * kRowBytes, rows);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        z[i][q][j][0] = z[i][q][j][1] = both(0.0f);
        multiply_f16(rows, word, word ^ j * 0x80008000u, z[i][q][j]);
      }
    }
  }
  auto butterflies = [&](int i, int q, int with_i, int with_q) {
#pragma unroll
    for (int n = 0; n < 4; ++n) butterfly(z[i][q][n / 2][n % 2], z[with_i][with_q][n / 2][n % 2]);
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    butterflies(i, 0, i, 1), butterflies(i, 2, i, 3);
    butterflies(i, 0, i, 2), butterflies(i, 1, i, 3);
  }
#pragma unroll
  for (int q = 0; q < 4 && kSize > 64; ++q) butterflies(0, q, 1, q);
#pragma unroll
  for (int n = 0; n < 32; ++n) {
    int column = n % 2, at = n / 2 % 8 * 2;
    const Pair& two = z[n / 16][at / 4][at / 2 % 2][column];
    element(x[n / 16], column, at) = two.a, element(x[n / 16], column, at + 1) = two.b;
  }
}

// Makes the same as rotated_by_products, by adders in the order of the reference.
Q2_INLINE void rotated_in_order(const u8* shared, Places places, Pair (&x)[2][16]) {
  u32 source = places.quarters();
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const u8* row = shared + (64 * group + i) * kRowBytes;
      u32 word = *(const u16*)(row + (source ^ twist(i))) |
                 *(const u16*)(row + (source ^ twist(i) ^ slot(1))) << 16;
      x[group][i] = two_of(word);
    }
    // Rotated zeros are +0: a sum is -0 only where its chunk's first element is (quantize_tiles.py).
    x[group][0] = add(x[group][0], both(0.0f));
    butterflies<kSize>(x[group]);
    if (kSize > 16) butterfly_across(x[group], 1);
    if (kSize > 32) butterfly_across(x[group], 2);
  }
  if (kSize > 64) butterfly_between(x);
}

// From two blocks element by element to the order of kNeighbors.
Q2_INLINE void pair_neighbors(Pair (&x)[16]) {
  Pair y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = x[i];
#pragma unroll
  for (int i = 0; i < 16; ++i) element(x, 0, i) = y[i].a, element(x, 1, i) = y[i].b;
}
