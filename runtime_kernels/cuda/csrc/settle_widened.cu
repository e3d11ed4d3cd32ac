// SPDX-License-Identifier: Apache-2.0
// The second phase of rotate_quantize.cu with Q2_WIDENED, where that made numbers from worths
// (widened.cuh): with the global scale known, those of blocks whose scale is an e4m3 subnormal are
// made again. Mostly there are none, which the smallest worth shows, and nothing is read.
//
//   worth, largest, scale, g   as in align_scales.cu (Q2_POW2 = 1); after `largest` the smallest
//                              worths but for zeros, less 1
//   values        bf16 [16 n], code * provisional(scale), becomes code * scale * g; NaN, as they are,
//                 under a worth of NaN, and all if g is
//   global_scale  1; NaN if g is
//
// Q2_SUMS: beside the sides, sums of columns (sums.cuh).
//
// Bytes a block, if any has to be mended: 4 read, and 32 read and written of those that have.

#include "scales.cuh"
#if Q2_SUMS
#include "sums.cuh"
#endif

struct Params {
  Side sides[kMostSides];  // whose `scales` are the values
#if Q2_SUMS
  Sums sums[kMostSums];
  int summed;  // how many of them there are, ahead of the sides
#endif
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in align_scales.py");

// The scale of a block whose numbers have to be made again: what they were made with, and what they
// should be, but for g.
struct Scales {
  float made, settled;
};

// worth: times factor; x: that over g.
Q2_INLINE Scales scales_of(const Side& side, long long block, float worth, float x) {
  x = min_or_nan(x, 448.0f);
  if constexpr (Q2_STOCHASTIC) {
    uint4 coins[1];
    philox(*side.seed, (u64)(block / 4), side.stream, COINS, coins);
    u32 drawn = coin(coins, block % 4);
    return {provisional(stochastic_4_bits(worth, drawn)), from_e4m3(stochastic_e4m3(x, drawn))};
  } else {
    return {provisional(worth), from_e4m3(to_e4m3(x))};
  }
}

constexpr int kLoads = 4;                     // of four worths each, on their way at once
constexpr int kOfWarp = 32 * 4 * kLoads;      // worths
constexpr int kWarps = kThreads / 32;

// The blocks of a warp's worths that are to be made again: two lanes make one, since a store of half a
// sector of memory takes as long as one of a whole, and all lanes have some where few have found them.
struct Found {
  u16 place[kWarps][kOfWarp];  // lane * 4 * kLoads + which of that lane's worths
  float worth[kWarps][kOfWarp];
};

// Half of a block. worth: times factor.
Q2_INLINE void mend(const Side& side, long long block, int half, float worth, float inverse,
                    float global_scale) {
  Scales scales = scales_of(side, block, worth, worth * inverse);
  make_again((uint4*)side.scales + block * 2 + half, scales.made, scales.settled, global_scale);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    settle_widened(const __grid_constant__ Params p) {
#if Q2_SUMS
  if (blockIdx.y < p.summed) {
    await_previous_kernel();
    add_up<kThreads>(p.sums[blockIdx.y]);
    return;
  }
  const Side& side = p.sides[blockIdx.y - p.summed];
#else
  const Side& side = p.sides[blockIdx.y];
#endif
  await_previous_kernel();
  float factor = factor_of(side), global_scale = global_scale_of(side, factor);
  bool poisoned = !(global_scale > 0.0f);
  if (blockIdx.x == 0 && threadIdx.x == 0) *side.global_scale = poisoned ? global_scale : 1.0f;
  float inverse = __frcp_rn(global_scale);
  // A coin may take a scale from below 2^-100 to there, and none from 2^-99 on.
  auto stands = [&](float worth) { return worth * inverse >= 0x1p-6f && worth >= 0x1p-99f; };
  u32 smallest = ~largest_of(side.largest + side.parts, side.parts, ~0u) + 1;  // 0: there is none
  if (!poisoned && (smallest == 0 || stands(__uint_as_float(smallest) * factor))) return;
  auto mended = [&](float worth) -> u32 {
    return poisoned || (worth != 0.0f && !stands(worth * factor));
  };
  __shared__ Found found;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  long long stride = (long long)gridDim.x * kThreads;
  for (long long first = blockIdx.x * (long long)kThreads + 32 * warp; 4 * first < side.count;
       first += kLoads * stride) {
    float4 worths[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      long long quad = first + lane + k * stride;
      bool inside = 4 * quad < side.count;
      worths[k] = inside ? ((const float4*)side.worth)[quad] : float4{0, 0, 0, 0};
    }
    u32 own = 0;  // bit 4 k + j: of worth j of quad k
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      own |= (mended(worths[k].x) | mended(worths[k].y) << 1 | mended(worths[k].z) << 2 |
              mended(worths[k].w) << 3)
             << (4 * k);
    if (__reduce_max_sync(~0u, own) == 0) continue;
    u32 before = __popc(own), all = before;  // of the lanes up to this one; of all
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      u32 others = __shfl_xor_sync(~0u, all, bit);
      if (lane & bit) before += others;
      all += others;
    }
    before -= __popc(own);
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const float of[4] = {worths[k].x, worths[k].y, worths[k].z, worths[k].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(own >> (4 * k + j) & 1)) continue;
        found.place[warp][before] = (u16)(lane * 4 * kLoads + 4 * k + j);
        found.worth[warp][before++] = of[j] * factor;
      }
    }
    __syncwarp();
    for (u32 number = lane / 2; number < all; number += 16) {
      u32 place = found.place[warp][number], which = place % (4 * kLoads);
      long long at = 4 * (first + place / (4 * kLoads) + which / 4 * stride) + which % 4;
      if (at >= side.count) continue;
      long long block = Q2_INTERLEAVED ? (at & ~7ll) | (at >> 1 & 3) | (at & 1) << 2 : at;
      mend(side, block, lane % 2, found.worth[warp][number], inverse, global_scale);
    }
    __syncwarp();
  }
}
