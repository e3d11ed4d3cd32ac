// SPDX-License-Identifier: Apache-2.0
// How lanes load and rotate the lines of a tile, which are its rows or its columns, for rotate_quantize.cu.
//
// Two neighboring lanes share a line of 128 elements, which are eight blocks of 16. Once the line is
// rotated, the first lane holds blocks 0, 1, 4 and 5, the second 2, 3, 6 and 7. A lane has two groups of 16
// pairs, x[0] and x[1]; each member of a group's pairs is a block:
//
//   kSwaps     members are neighbors, groups lie 64 elements apart: blocks 0 and 1, then 4 and 5
//   otherwise  groups are neighbors, members lie 64 elements apart: blocks 0 and 4, then 1 and 5
#pragma once
#include "tile_sums.cuh"

// h = 1, 2, 4, 8 of chunks of kChunk, in registers.
template <int kChunk> Q2_INLINE void butterflies(Pair (&x)[16]) {
#pragma unroll
  for (int h = 1; h < 16 && h < kChunk; h *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & h) continue;
      Pair a = x[i], b = x[i + h];
      x[i] = add(a, b);
      x[i + h] = sub(a, b);
    }
  }
}

// One butterfly between lanes that differ in bit `mask`: a + b in the lower, a - b in the upper.
Q2_INLINE void butterfly_across(Pair (&x)[16], int mask) {
  Pair sign = both(threadIdx.x & mask ? -1.0f : 1.0f);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = fma(x[i], sign, from_lane(x[i], mask));
  }
}

// h = 32 and 64, where lanes have 64 elements in a row. Of the butterflies of 32 each lane saves those
// results that it has both terms of at 64, and gives the other lane the rest: the one with the first half
// (sign 1) saves differences and gets those of the second half, negated, so that each result is one
// multiply-add. They are made as x - y, not as -(y - x): a 0 among them has the wrong sign, which would
// show only beside a -0 of the first half, and that has none (rotate_line).
Q2_INLINE void butterflies_swapping(Pair (&x)[2][16]) {
  u32 odd = threadIdx.x << 31;
  Pair sign = both(__uint_as_float(0xBF800000u ^ odd)), opposite = both(__uint_as_float(0x3F800000u ^ odd));
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    Pair own = fma(x[1][i], opposite, x[0][i]), got = from_lane(fma(x[0][i], sign, x[1][i]), 1);
    x[0][i] = fma(got, opposite, own);
    x[1][i] = fma(own, sign, got);
  }
}

// One butterfly between the two groups of blocks that a thread holds.
Q2_INLINE void butterfly_between(Pair (&x)[2][16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    Pair a = x[0][i], b = x[1][i];
    x[0][i] = add(a, b);
    x[1][i] = sub(a, b);
  }
}

template <int kChunk> Q2_INLINE void rotate_line(Pair (&x)[2][16]) {
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    // Rotated zeros are +0: a sum is -0 only where its chunk's first element is (quantize_tiles.py).
    if (kChunk == 16 || (kChunk > 16 && group == 0)) x[group][0] = add(x[group][0], both(0.0f));
    butterflies<kChunk>(x[group]);
  }
  if (kSwaps) {
#pragma unroll
    for (int group = 0; group < 2; ++group)
#pragma unroll
      for (Pair& v : x[group]) v = sum_and_difference(v);
    return butterflies_swapping(x);
  }
  if (kChunk > 16) butterfly_between(x);
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    if (kChunk > 32) butterfly_across(x[group], 1);
    if (kChunk > 64) {
#pragma unroll
      for (Pair& v : x[group]) v = sum_and_difference(v);
    }
  }
}

// at: where the tile lies in `shared`; as a part of what changes from piece to piece it needs no addition.
Q2_INLINE void load_row(const Masks& masks, const u8* shared, u32 at, Places places, Pair (&x)[2][16]) {
  constexpr int kPieces = kBlock * kBytes / 16, kPerPiece = 16 / kBytes;
  u32 source = at + places.rowwise();
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      u32 words[2][4], signs[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int block = kSwaps ? 2 * group + half : group + 4 * half;  // from the lane's part on
        int piece = block * kPieces + i;
        uint4 v = *(const uint4*)(shared + (source ^ slot(piece)));
        uint4 m = {0, 0, 0, 0};
        if (kRowSigned) m = ((const uint4*)masks.rowwise)[part_of_lane() * kBytes / 16 + piece];
        words[half][0] = v.x, words[half][1] = v.y, words[half][2] = v.z, words[half][3] = v.w;
        signs[half][0] = m.x, signs[half][1] = m.y, signs[half][2] = m.z, signs[half][3] = m.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Pair* to = x[group] + i * kPerPiece + j * kPerPiece / 4;
        if constexpr (kBytes == 2) {
          Pair a = two_of_row(words[0][j], signs[0][j]), b = two_of_row(words[1][j], signs[1][j]);
          to[0] = {a.a, b.a};
          to[1] = {a.b, b.b};
        } else {
          to[0] = {__uint_as_float(words[0][j] ^ signs[0][j]),
                   __uint_as_float(words[1][j] ^ signs[1][j])};
        }
      }
    }
  }
}

// Eight elements of a column with their signs, from row `row` on without that of the lane. With dbias,
// adds them without signs to `sum`.
Q2_INLINE void load_eight(const Masks& masks, const u8* shared, u32 source, int row, float* y,
                          [[maybe_unused]] float& sum) {
  constexpr int kWords = kSignPairs ? 4 : 8;
  int first = (part_of_lane() + row) * kWords / 8;
  u32 signs[kWords];
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    uint4 m = kSigned && !kScaled ? *(const uint4*)(masks.columnwise + first + i) : uint4{0, 0, 0, 0};
    signs[i] = m.x, signs[i + 1] = m.y, signs[i + 2] = m.z, signs[i + 3] = m.w;
  }
  if constexpr (kBytes == 2) {
    u32 words[4];  // of two rows each
    load_transposed(shared + (source ^ twist(row)) + row * kRowBytes, words);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pair two = kSignsMultiply
                     ? signed_bf16x2(words[i], signs[2 * i % kWords], signs[(2 * i + 1) % kWords])
                     : signed_two(words[i], signs[i]);
      y[2 * i] = two.a, y[2 * i + 1] = two.b;
      if constexpr (kSums && kMixed) add_two_to_sum(sum, words[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      u32 word = *(const u32*)(shared + (source ^ twist(row + i)) + (row + i) * kRowBytes);
      y[i] = __uint_as_float(word ^ signs[i % kWords]);
    }
  }
  if constexpr (kSums && !kMixed) add_to_sum(sum, y, part_of_lane() + row);
}

Q2_INLINE void load_column(const Params& p, const Masks& masks, Tile tile, const u8* shared,
                           Places places, Pair (&x)[2][16]) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    float y[32];  // half after half
#pragma unroll
    for (int i = 0; i < 32; i += 8)
      load_eight(masks, shared, places.columnwise(),
                 kSwaps ? 32 * group + i : 16 * group + i / 16 * 64 + i % 16, y + i, sums[group]);
#pragma unroll
    for (int i = 0; i < 16; ++i) x[group][i] = {y[i], y[16 + i]};
  }
  if constexpr (kSums) store_sums(p, tile, sums[0] + sums[1]);
}
