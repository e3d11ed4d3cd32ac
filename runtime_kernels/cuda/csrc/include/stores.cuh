// SPDX-License-Identifier: Apache-2.0
// Stores of codes, scales, raw scales and masks, for rotate_quantize.cu.
#pragma once
#include "lines.cuh"
#include "rounding.cuh"

// An unsigned integer of so many bytes.
template <int n> struct Unsigned { using type = u32; };
template <> struct Unsigned<2> { using type = u16; };
template <> struct Unsigned<1> { using type = u8; };
template <int n> using BytesOf = typename Unsigned<n>::type;

// A thread's results, by groups and members of the pairs.
struct Results {
  u32 codes[2][2][2];
  u32 stored[2][2];
  u32 trusted[2];  // kMasked: of a member's two blocks
};

// Where the results for one row of the output go, from block `block` on. The raw scales of a chunk of
// 128 lie in the order 0 4 1 5 2 6 3 7, so that those of one lane are neighbors, and
// lanes write whole 32-byte sectors: half-written ones cost L2 as much time as all the arithmetic
// here.
struct Target {
  u8* codes;
  u8* scales;
  int left;  // blocks that exist from here on
};
constexpr bool kInterleaved = kRawScales && kSize == 128;
constexpr bool kSwizzled = Q2_SWIZZLED;

Q2_INLINE Target target_at(const Output& out, int row, int block) {
  long long at = (long long)row * out.blocks + block;
  long long scales_at = kRawScales ? 4 * at : (kRule == MX ? at / 2 : at);
  return {out.codes + at * 8, (u8*)out.scales + scales_at,
          row < out.rows ? out.blocks - block : 0};
}

// One block, `ahead` of the target's.
Q2_INLINE void store(const Target& target, int ahead, const u32 (&codes)[2], u32 stored) {
  if (ahead >= target.left) return;
  if (kCodes) *(uint2*)(target.codes + ahead * 8) = {codes[0], codes[1]};
  if constexpr (kSwizzled) return;  // store_swizzled
  if constexpr (kRawScales) ((u32*)target.scales)[ahead] = stored;
  else if constexpr (kRule == EXACT) target.scales[ahead] = (u8)stored;
  else if (ahead % 2 == 0) target.scales[ahead / 2] = (u8)stored;
}

// Scales of one row of the result, from block `block` of 16 on: one as u8, two as u16, or four as u32.
template <typename Bytes>
Q2_INLINE void store_swizzled(const Output& out, int row, int block, u32 bytes) {
  constexpr int kShift = kRule == MX;  // blocks of 32
  int across = ((out.blocks >> kShift) + 3) / 4;
  block >>= kShift;
  if (block / 4 < across && row / 128 * 128 < out.rows)
    *(Bytes*)((u8*)out.scales + swizzled_at(row, block, across)) =
        (Bytes)(row < out.rows ? bytes : 0);
}

// The mask of two neighbors.
Q2_INLINE void store_mask([[maybe_unused]] const Params& p, const Output& out, int row, int block,
                          u32 trusted) {
#if Q2_MASKED
  p.mask[((long long)row * out.blocks + block) / 2] = trusted;
#endif
}

// The scales of one half of a part as bytes, and those of both.
constexpr int kScalesOfHalf = kRule == MX ? 1 : 2;
using HalfScales = BytesOf<kScalesOfHalf>;
using PartScales = BytesOf<2 * kScalesOfHalf>;
Q2_INLINE u32 scales_of_half(const Results& made, int half) {
  return kRule == MX ? made.stored[0][half] : made.stored[0][half] | made.stored[1][half] << 8;
}
Q2_INLINE u32 scales_of_part(const Results& made) {
  return scales_of_half(made, 0) | scales_of_half(made, 1) << 8 * kScalesOfHalf;
}

Q2_INLINE uint4 codes_of_half(const Results& made, int half) {
  const auto& codes = made.codes;
  return {codes[0][half][0], codes[0][half][1], codes[1][half][0], codes[1][half][1]};
}

// Part `part` of a line, where rows have blocks in fours: whole sectors of codes, by one lane or by two.
// Raw scales: store_raw_scales.
Q2_INLINE void store_part(const Target& target, int part, const Results& made) {
  constexpr bool kScales = !kSwizzled && !kRawScales;
  int block = block_of_part(part);
  if constexpr (kLanes == 1) {
    if (block >= target.left) return;
    if (kCodes)
      store_sector(target.codes + 8 * block, codes_of_half(made, 0), codes_of_half(made, 1));
    if (kScales) ((PartScales*)target.scales)[part] = (PartScales)scales_of_part(made);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half, block += 4) {
      if (block >= target.left) continue;
      if (kCodes) *(uint4*)(target.codes + 8 * block) = codes_of_half(made, half);
      if (kScales) ((HalfScales*)target.scales)[block / 2] = (HalfScales)scales_of_half(made, half);
    }
  }
}

Q2_INLINE void store_swizzled_part(const Output& out, int row, int first, int part, const Results& made) {
  int block = first + block_of_part(part);
  if constexpr (kLanes == 1) {
    store_swizzled<PartScales>(out, row, block, scales_of_part(made));
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_swizzled<HalfScales>(out, row, block + 4 * half, scales_of_half(made, half));
  }
}

// The raw scales of a line, where rows have them in fours. Two lanes swap two of them each, so that each
// has four neighbors; one lane stores a whole sector, if rows have them in eights.
Q2_INLINE void store_raw_scales(const Output& out, const Target& target, const Results (&made)[kParts]) {
  u32 four[kParts][4];
#pragma unroll
  for (int i = 0; i < 2 * kParts; ++i) {
    int part = i / 2, group = i % 2;
    u32 lower = made[part].stored[group][0], upper = made[part].stored[group][1];
    if constexpr (kLanes == 1) {
      four[part][group] = lower, four[part][2 + group] = upper;
    } else {
      int lane = lane_of_line();
      u32 got = __shfl_xor_sync(~0u, lane ? lower : upper, 1);
      four[part][group] = lane ? got : lower;
      four[part][2 + group] = lane ? upper : got;
    }
  }
  auto words = [&](int part) { return uint4{four[part][0], four[part][1], four[part][2], four[part][3]}; };
  if constexpr (kLanes == 1) {
    if (out.blocks % 8 == 0 && target.left > 0) return store_sector(target.scales, words(0), words(kParts - 1));
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    int at = kLanes == 1 ? part : lane_of_line();
    if (4 * at < target.left) ((uint4*)target.scales)[at] = words(part);
  }
}
