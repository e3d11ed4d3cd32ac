// The bf16 numbers that codes stand for, for rotate_quantize.cu with Q2_WIDENED: code * scale, and
// where the global scale is a power of two times that too. 6 significant bits, so exact.
//
// With worths (MS_EDEN, POW2) the scale waits for the largest of them, but all that comes of the
// wait is whether it is an e4m3 subnormal: if it is not, it has the 4 bits that the worth alone
// gives. So the numbers are made with those (numbers.cuh, provisional), and settle_widened.cu mends
// the others; where there are codes as well, align_scales.cu does.
//
// A lane holds blocks of 16 and memory wants whole lines, so a warp puts its 16 rows of 128 numbers
// into shared memory first. Piece `piece` (16 bytes) of row r lies at r * 256 + 16 * (piece ^
// spread(r)): eight lanes meet no bank twice, whether they store along rows (four rows, pieces 4
// apart) or along columns (one piece of every other row, or in expand_codes' order).
#pragma once
#include "rounding.cuh"

constexpr int kStagedRows = 16;
constexpr int kStagedRowBytes = 256;
constexpr int kStagedBytes = kStagedRows * kStagedRowBytes;  // of a warp

constexpr Q2_INLINE u32 spread(int row) {
  return 16 * (((row ^ row >> 2) & 1) | (row & 2) | (row >> 3 & 1) << 2);
}

// Where the numbers along rows go.
Q2_INLINE u8* values_of([[maybe_unused]] const Params& p, [[maybe_unused]] const Output& out) {
#if Q2_WIDENED == 2
  return p.values;
#else
  return out.codes;
#endif
}

// What a warp makes of its 16 rows of the result, on its way through shared memory.
struct Staged {
  u8* shared;
  u32 base;  // of the warp's rows, after the tiles
  u8* values;
  const Output& out;
  const Common& common;

  Q2_INLINE Staged(u8* shared, u8* values, const Output& out, const Common& common)
      : shared(shared),
        base(kStages * kStageBytes + threadIdx.x / 32 * kStagedBytes),
        values(values),
        out(out),
        common(common) {}

  // Where byte `byte` of a row goes, for put.
  Q2_INLINE u32 place(int row, int byte) const {
    return base + row * kStagedRowBytes + (byte ^ spread(row));
  }

  // What the codes of a block are multiplied by. MS_EDEN: the scale is drawn with its own coin.
  Q2_INLINE float scale_value(u32 stored, u32 coin) const {
    if constexpr (kRule == MX) return from_e8m0(stored);
    if constexpr (kRule == EXACT) return from_e4m3(stored);
    float worth = __uint_as_float(stored);
    if constexpr (kRule == MS_EDEN) worth = stochastic_4_bits(worth * common.factor, coin);
    return stored == 0 ? 0.0f : provisional(worth);
  }

  // One block, which is one member of the pairs (kUnit), times its scale, as pieces `piece` and
  // piece + 1 from `at`.
  Q2_INLINE void put(u32 at, int piece, const Pair (&block)[16], int member, u32 stored,
                     u32 coin) const {
    float scale = scale_value(stored, coin) * (1.0f / kUnit);
    u32 two = to_bf16x2(scale, scale), words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Pair &v = block[2 * i], &w = block[2 * i + 1];
      words[i] = mul_bf16x2(member ? to_bf16x2(v.b, w.b) : to_bf16x2(v.a, w.a), two);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *(uint4*)(shared + (at ^ 16 * (piece + half))) = {words[4 * half], words[4 * half + 1],
                                                        words[4 * half + 2], words[4 * half + 3]};
  }

  // The warp's rows of a tile, from `place_in_tile` on, go to the rows of the output that they come
  // from, from block `block` on.
  Q2_INLINE void store_rows(const Rows& rows, int place_in_tile, int block) const {
    if constexpr (!kGrouped) return store(rows.first + place_in_tile, block);
    __syncwarp();
    int piece = threadIdx.x % 16, first = threadIdx.x / 16 % 2;
    u32 at = place(first, 16 * piece);
    bool inside = block + piece / 2 < out.blocks;
#pragma unroll
    for (int i = 0; i < kStagedRows; i += 2) {
      uint4 v = *(const uint4*)(shared + (at ^ spread(i)) + i * kStagedRowBytes);
      int row = row_of_result(out, rows, place_in_tile + first + i);
      if (inside && row < out.rows)
        *(uint4*)(values + ((long long)row * out.blocks + block) * 32 + piece * 16) = v;
    }
    __syncwarp();
  }

  // The warp's rows go to rows `row` ... of the output, from block `block` on.
  Q2_INLINE void store(int row, int block) const {
    __syncwarp();
    int piece = threadIdx.x % 16, first = threadIdx.x / 16 % 2;
    u32 at = place(first, 16 * piece);
    bool inside = block + piece / 2 < out.blocks;
    u8* target = values + ((long long)(row + first) * out.blocks + block) * 32 + piece * 16;
#pragma unroll
    for (int i = 0; i < kStagedRows; i += 2) {
      uint4 v = *(const uint4*)(shared + (at ^ spread(i)) + i * kStagedRowBytes);
      if (inside && row + first + i < out.rows)
        *(uint4*)(target + (long long)i * out.blocks * 32) = v;
    }
    __syncwarp();
  }
};

// Coins of the scales of the four blocks that a lane has along a row, [group][half]: the lanes of a
// row make a Philox block each, and swap halves.
Q2_INLINE void coins_along_row(const Output& out, int row, int block, u32 (&coins)[2][2]) {
  int side = threadIdx.x % 2;
  uint4 drawn[1];
  philox(*out.seed, ((u64)row * out.blocks + block) / 4 + side, out.stream, COINS, drawn);
  uint4 c = drawn[0];
  u32 keep[2] = {side ? c.z : c.x, side ? c.w : c.y};
  u32 give[2] = {side ? c.x : c.z, side ? c.y : c.w};
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    u32 got = __shfl_xor_sync(~0u, give[group], 1);
    coins[group][0] = side ? got : keep[group];
    coins[group][1] = side ? keep[group] : got;
  }
}

// The same along a pair of columns, [group][column], whose four lanes make a Philox block each and
// transpose them.
Q2_INLINE void coins_along_cols(const Output& out, int first, int second, int block,
                                u32 (&coins)[2][2]) {
  int quarter = threadIdx.x / 8 % 4;
  uint4 drawn[1];
  u64 index = ((u64)(quarter < 2 ? first : second) * out.blocks + block) / 4 + quarter % 2;
  philox(*out.seed, index, out.stream, COINS, drawn);
  u32 w[4] = {drawn[0].x, drawn[0].y, drawn[0].z, drawn[0].w};
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    bool upper = quarter & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      u32 got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + bit], 8 * bit);
      (upper ? w[i] : w[i + bit]) = got;
    }
  }
  coins[0][0] = w[0], coins[1][0] = w[1], coins[0][1] = w[2], coins[1][1] = w[3];
}
