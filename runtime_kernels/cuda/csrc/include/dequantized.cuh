// SPDX-License-Identifier: Apache-2.0
// Dequantized operands, bf16, for rotate_quantize.cu with Q2_DEQUANTIZED: code * scale, and
// where the global scale is a power of two times that too. 6 significant bits, so exact.
//
// With raw scales (MS_EDEN, POW2) a block's scale depends on the largest raw scale of the tensor, which
// is not known yet. But a scale that is no e4m3 subnormal has the 4 significant bits of its raw scale.
// So codes are multiplied by the raw scale in 4 bits (formats.cuh, provisional), and
// finalize_dequantized.cu fixes up blocks whose scale turns out to be a subnormal.
//
// A lane holds blocks of 16, and stores to memory should fill whole lines. So a warp first writes its
// 16 rows of 128 elements into shared memory. Rows j and j + 8 lie side by side, and each such pair has
// 16 bytes of padding. Then eight lanes, which write four rows in pieces of 16 bytes, 4 pieces apart, have
// no bank conflict. Addresses differ by constants.
#pragma once
#include "rounding.cuh"

constexpr int kStagedRows = 16;
constexpr int kStagedRowBytes = 256;
constexpr int kStagedPitch = 2 * kStagedRowBytes + 16;  // of two rows
constexpr int kStagedBytes = kStagedRows / 2 * kStagedPitch - 16;  // of a warp

// Row j of those is this one of 16 of the result. Columnwise it is that of lane 2 j (column_of_lane).
template <bool kColumns>
constexpr Q2_INLINE int row_of_staged(int j) {
  return kColumns ? column_at(j / 2 + j % 2 * 8) : j;
}

// The factor of a block's codes. MS_EDEN: the scale is rounded with random bits of its own.
Q2_INLINE float scale_value(const Common& common, u32 stored, u32 random_bits) {
  if constexpr (kRule == MX) return from_e8m0(stored);
  if constexpr (kRule == EXACT) return from_e4m3(stored);
  float raw_scale = __uint_as_float(stored);
  if constexpr (kRule == MS_EDEN) {  // 0 becomes 1, which serves as well for codes that are all 0
    raw_scale *= common.factor;
    float scale = provisional(stochastic_4_bits(raw_scale, random_bits));
    return __fmaf_rn(raw_scale, 0.0f, scale);  // which does not change it, or is NaN
  }
  return stored == 0 ? 0.0f : provisional(raw_scale);
}

// A warp's 16 rows of the result, staged in shared memory.
struct Staged {
  u8* shared;
  u32 base;  // of the warp's rows, after the tiles
  const Output& out;
  const Common& common;

  Q2_INLINE Staged(u8* shared, const Output& out, const Common& common)
      : shared(shared),
        base(kStages * kStageBytes + threadIdx.x / 32 * kStagedBytes),
        out(out),
        common(common) {}

  // Where byte `byte` of a row goes, for put.
  Q2_INLINE u32 place(int row, int byte) const {
    return base + row % 8 * kStagedPitch + row / 8 * kStagedRowBytes + byte;
  }

  // One of two blocks in pairs (kUnit), times its scale, as pieces `piece` and
  // piece + 1 from `at`.
  Q2_INLINE void put(u32 at, int piece, const Pair (&block)[16], int member, u32 stored,
                     u32 random_bits) const {
    float scale = scale_value(common, stored, random_bits) * (1.0f / kUnit);
    u32 two = to_bf16x2(scale, scale), words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float low = element(block, member, 2 * i), high = element(block, member, 2 * i + 1);
      words[i] = mul_bf16x2(to_bf16x2(low, high), two);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *(uint4*)(shared + at + 16 * (piece + half)) = {words[4 * half], words[4 * half + 1],
                                                      words[4 * half + 2], words[4 * half + 3]};
  }

  // The warp's rows of a tile, from `place_in_tile` on, go to the rows of the output that they come
  // from, from block `block` on.
  Q2_INLINE void store_rows(const Rows& rows, int place_in_tile, int block) const {
    int row = rows.first + place_in_tile;
    bool in_order = !kGrouped || (rows.shift == 0 && place_in_tile + kStagedRows <= rows.count);
    store<false>(row, block, in_order, [&](int j) {
      return kGrouped ? row_of_result(out, rows, place_in_tile + j) : row + j;
    });
  }

  // The warp's columns of a tile go to rows `row` ... of the output, from block `block` on.
  Q2_INLINE void store_cols(int row, int block) const {
    store<true>(row, block, true, [&](int j) { return row + row_of_staged<true>(j); });
  }

 private:
  // Row j goes to row_of(j); in_order: to `row` and row_of_staged(j) more.
  template <bool kColumns, typename RowOf>
  Q2_INLINE void store(int row, int block, bool in_order, RowOf row_of) const {
    __syncwarp();
    int piece = threadIdx.x % 16, first = threadIdx.x / 16 % 2;
    if (in_order && row + kStagedRows <= out.rows && block + kStagedRowBytes / 32 <= out.blocks) {
      const uint4* from = staged(first, piece);
      uint4* to = target(row + row_of_staged<kColumns>(first), block, piece);
#pragma unroll
      for (int i = 0; i < kStagedRows; i += 2)
        to[(u64)(2 * row_of_staged<kColumns>(i)) * (u32)out.blocks] =
            from[(i % 8 * kStagedPitch + i / 8 * kStagedRowBytes) / 16];
    } else if (block + piece / 2 < out.blocks) {
#pragma unroll 1
      for (int i = first; i < kStagedRows; i += 2) {
        int at = row_of(i);
        if (at < out.rows) *target(at, block, piece) = *staged(i, piece);
      }
    }
    __syncwarp();
  }
  Q2_INLINE const uint4* staged(int row, int piece) const {
    return (const uint4*)(shared + place(row, 16 * piece));
  }
  Q2_INLINE uint4* target(int row, int block, int piece) const {
    return (uint4*)(out.codes + ((long long)row * out.blocks + block) * 32) + piece;
  }
};

// Random bits of the scales of the four blocks that one lane has of a line, [group][half]: the lanes of a
// line make a Philox block each, and hand them on through the warp's shared memory.
Q2_INLINE void random_bits_of_line(const Staged& staged, int row, int block, u32 (&random_bits)[2][2]) {
  uint4 drawn[1];
  const Output& out = staged.out;
  int lane_of_row = threadIdx.x % 2;
  u64 index = ((u64)row * out.blocks + block) / 4 + lane_of_row;
  philox(*out.seed, index, out.rng_offset, RANDOM_BITS, drawn);
  uint4* own = (uint4*)(staged.shared + staged.base) + threadIdx.x % 32;
  *own = drawn[0];
  __syncwarp();
  const uint2* of_line = (const uint2*)(own - lane_of_row) + lane_of_row;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint2 two = of_line[2 * half];
    random_bits[0][half] = two.x, random_bits[1][half] = two.y;
  }
  __syncwarp();
}
