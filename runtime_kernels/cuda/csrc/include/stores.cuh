// SPDX-License-Identifier: Apache-2.0
// Stores of codes, scales, raw scales and masks, for rotate_quantize.cu.
#pragma once
#include "rounding.cuh"

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
  u32 at;  // blocks ahead of it in the result
  u8* codes;
  u8* scales;
  int left;  // blocks that exist from here on
};
constexpr bool kInterleaved = kRawScales && kSize == 128;
constexpr bool kSwizzled = Q2_SWIZZLED;

Q2_INLINE Target target_at(const Output& out, int row, int block) {
  u32 at = (u32)row * out.blocks + block;  // plan.py refuses operands too large for 32 bits
  u64 scales_at = kRawScales ? mul_wide(at, 4) : (kRule == MX ? at / 2 : at);
  return {at, out.codes + mul_wide(at, 8), (u8*)out.scales + scales_at,
          row < out.rows ? out.blocks - block : 0};
}

// Where the raw scales of a lane of a line go, if lanes have four neighbors. target: of its first block.
Q2_INLINE uint4* four_raw_scales(const Output& out, const Target& target) {
  return (uint4*)((u32*)out.scales + (target.at + threadIdx.x % 2 * 2));
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

// Two neighbors, where there are both or none; ahead is even. Raw scales: store_four_raw_scales.
Q2_INLINE void store_two(const Target& target, int ahead, const u32 (&first)[2],
                         const u32 (&second)[2], u32 stored_first, u32 stored_second) {
  if (ahead >= target.left) return;
  if (kCodes)
    *(uint4*)(target.codes + ahead * 8) = {first[0], first[1], second[0], second[1]};
  if constexpr (kSwizzled || kRawScales) return;  // store_swizzled
  if constexpr (kRule == EXACT)
    ((u16*)target.scales)[ahead / 2] = (u16)(stored_first | stored_second << 8);
  else target.scales[ahead / 2] = (u8)stored_first;
}

// Scales of one row of the result, from block `block` of 16 on: one as u8, or two as u16.
template <typename Bytes>
Q2_INLINE void store_swizzled(const Output& out, int row, int block, u32 bytes) {
  constexpr int kShift = kRule == MX;  // blocks of 32
  int across = ((out.blocks >> kShift) + 3) / 4;
  block >>= kShift;
  if (block / 4 < across && row / 128 * 128 < out.rows)
    *(Bytes*)((u8*)out.scales + swizzled_at(row, block, across)) =
        (Bytes)(row < out.rows ? bytes : 0);
}

// Stores the scales of two neighboring blocks of 16. In MX (blocks of 32) they are one scale.
Q2_INLINE void store_two_swizzled(const Output& out, int row, int block, u32 first, u32 second) {
  if constexpr (kRule == MX) store_swizzled<u8>(out, row, block, first);
  else store_swizzled<u16>(out, row, block, first | second << 8);
}

// The mask of two neighbors.
Q2_INLINE void store_mask([[maybe_unused]] const Params& p, const Output& out, int row, int block,
                          u32 trusted) {
#if Q2_MASKED
  p.mask[((long long)row * out.blocks + block) / 2] = trusted;
#endif
}

// The raw scales of a row of a tile, where rows have them in fours: its lanes swap two of them each, so
// that each has four neighbors.
Q2_INLINE void store_four_raw_scales(const Output& out, const Target& target, const Results& made) {
  int lane_of_row = threadIdx.x % 2;
  u32 four[4];
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    u32 lower = made.stored[group][0], upper = made.stored[group][1];
    u32 got = __shfl_xor_sync(~0u, lane_of_row ? lower : upper, 1);
    four[group] = lane_of_row ? got : lower;
    four[2 + group] = lane_of_row ? upper : got;
  }
  if (2 * lane_of_row < target.left)
    *four_raw_scales(out, target) = {four[0], four[1], four[2], four[3]};
}
