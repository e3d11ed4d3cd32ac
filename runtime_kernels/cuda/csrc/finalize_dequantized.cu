// SPDX-License-Identifier: Apache-2.0
// The tail kernel after rotate_quantize.cu with Q2_DEQUANTIZED, which multiplied codes by raw scales
// (dequantized.cuh). Now the global scale is known. Blocks whose scale is an e4m3 subnormal are rescaled
// in place. Usually there are none: the smallest raw scale shows it, and nothing is read.
//
//   raw_scale, largest, scale, g   as in align_scales.cu (Q2_POW2 = 1); `largest` is followed by the
//                              smallest raw scale above 0 of each thread block, less 1
//   dequantized   bf16 [16 n], code * provisional(scale), becomes code * scale * g. A block whose raw
//                 scale is NaN stays NaN; if g is NaN, all become NaN
//   global_scale  1; NaN if g is
//
// Q2_SUMS: makes dbias as well (sums.cuh).
//
// Bytes, if any block has to be fixed up: 4 read for each block, 32 read and written for those blocks.

#include "scales.cuh"

// The scale of a block to be rescaled: the one its elements were multiplied by, and the right one, both
// without g.
struct Scales {
  float made, finalized;
};

// raw_scale: times factor; x: that over g.
Q2_INLINE Scales scales_of(const Operand& operand, long long block, float raw_scale, float x) {
  x = min_or_nan(x, 448.0f);
  if constexpr (Q2_STOCHASTIC) {
    uint4 random_bits[1];
    philox(*operand.seed, (u64)(block / 4), operand.rng_offset, RANDOM_BITS, random_bits);
    u32 drawn = word_of(random_bits, block % 4);
    return {provisional(stochastic_4_bits(raw_scale, drawn)), from_e4m3(stochastic_e4m3(x, drawn))};
  } else {
    return {provisional(raw_scale), from_e4m3(to_e4m3(x))};
  }
}

constexpr int kLoads = 4;                     // of four raw scales each, on their way at once
constexpr int kOfWarp = 32 * 4 * kLoads;      // raw scales
constexpr int kWarps = kThreads / 32;

// The blocks of a warp that are to be rescaled. Two lanes take one block, since a store of half a sector
// takes as long as one of a whole sector. The list shares the work among all lanes even if few found it.
struct Found {
  u16 place[kWarps][kOfWarp];  // lane * 4 * kLoads + which of that lane's raw scales
  float raw_scale[kWarps][kOfWarp];
};

// Half of a block. raw_scale: times factor.
Q2_INLINE void fix_up(const Operand& operand, long long block, int half, float raw_scale, float inverse,
                    float global_scale) {
  Scales scales = scales_of(operand, block, raw_scale, raw_scale * inverse);
  rescale((uint4*)operand.scales + block * 2 + half, scales.made, scales.finalized, global_scale);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    finalize_dequantized(const __grid_constant__ Params p) {
  if (adds_up(p)) return;
  const Operand& operand = operand_of(p);
  await_previous_kernel();
  float factor = factor_of(operand), global_scale = global_scale_of(operand, factor);
  bool poisoned = !(global_scale > 0.0f);
  if (blockIdx.x == 0 && threadIdx.x == 0) *operand.global_scale = poisoned ? global_scale : 1.0f;
  float inverse = __frcp_rn(global_scale);
  // Random bits may take a scale from below 2^-100 to there, and none from 2^-99 on.
  auto stands = [&](float raw_scale) {
    return raw_scale * inverse >= 0x1p-6f && raw_scale >= 0x1p-99f;
  };
  u32 smallest = ~largest_of(operand.largest + operand.parts, operand.parts, ~0u) + 1;  // 0: there is none
  if (!poisoned && (smallest == 0 || stands(__uint_as_float(smallest) * factor))) return;
  auto is_fixed_up = [&](float raw_scale) -> u32 {
    return poisoned || (raw_scale != 0.0f && !stands(raw_scale * factor));
  };
  __shared__ Found found;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  long long stride = (long long)gridDim.x * kThreads;
  for (long long first = blockIdx.x * (long long)kThreads + 32 * warp; 4 * first < operand.count;
       first += kLoads * stride) {
    float4 raw_scales[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      long long quad = first + lane + k * stride;
      bool inside = 4 * quad < operand.count;
      raw_scales[k] = inside ? ((const float4*)operand.raw_scale)[quad] : float4{0, 0, 0, 0};
    }
    u32 own = 0;  // bit 4 k + j: of raw scale j of quad k
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      own |= (is_fixed_up(raw_scales[k].x) | is_fixed_up(raw_scales[k].y) << 1 |
              is_fixed_up(raw_scales[k].z) << 2 | is_fixed_up(raw_scales[k].w) << 3)
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
      const float of[4] = {raw_scales[k].x, raw_scales[k].y, raw_scales[k].z, raw_scales[k].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!(own >> (4 * k + j) & 1)) continue;
        found.place[warp][before] = (u16)(lane * 4 * kLoads + 4 * k + j);
        found.raw_scale[warp][before++] = of[j] * factor;
      }
    }
    __syncwarp();
    for (u32 number = lane / 2; number < all; number += 16) {
      u32 place = found.place[warp][number], which = place % (4 * kLoads);
      long long at = 4 * (first + place / (4 * kLoads) + which / 4 * stride) + which % 4;
      if (at >= operand.count) continue;
      long long block = Q2_INTERLEAVED ? (at & ~7ll) | (at >> 1 & 3) | (at & 1) << 2 : at;
      fix_up(operand, block, lane % 2, found.raw_scale[warp][number], inverse, global_scale);
    }
    __syncwarp();
  }
}
