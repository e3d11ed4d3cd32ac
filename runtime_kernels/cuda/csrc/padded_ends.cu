// SPDX-License-Identifier: Apache-2.0
// Where groups of rows end once each is padded to whole chunks (numerics/groups.py:padded_ends).
//
//   ends  s32 [groups], ascending
//   out   s32 [groups]
//
// One warp, 32 groups at a time: a sum of the chunks up to each lane, in five exchanges. With
// Q2_FILLED an empty group has a chunk, too.

#include "formats.cuh"

constexpr int kThreads = 32;
constexpr int kUnitBits = 7;  // chunks of 128

struct Params {
  const int* ends;
  int* out;
  int groups;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in padded_ends.py");

extern "C" __global__ void __launch_bounds__(kThreads)
    padded_ends(const __grid_constant__ Params p) {
  u32 before = 0;  // chunks of the groups of earlier rounds
  for (int first = 0; first < p.groups; first += kThreads) {
    int group = first + threadIdx.x;
    int size = group < p.groups ? p.ends[group] - (group ? p.ends[group - 1] : 0) : 0;
#if Q2_FILLED
    size = max(size, 1);
#endif
    u32 chunks = (size + (1 << kUnitBits) - 1) >> kUnitBits;
    u32 total = chunks;  // of all lanes that differ from this one in the bits so far
#pragma unroll
    for (int bit = 1; bit < kThreads; bit *= 2) {
      u32 others = __shfl_xor_sync(~0u, total, bit);
      if (threadIdx.x & bit) chunks += others;
      total += others;
    }
    if (group < p.groups) p.out[group] = (int)((before + chunks) << kUnitBits);
    before += total;
  }
}
