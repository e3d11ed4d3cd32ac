// SPDX-License-Identifier: Apache-2.0
// The largest and the smallest raw scale of a thread block of rotate_quantize.cu, for the tail kernel.
#pragma once
#include "rounding.cuh"

// The range of one output's raw scales, without NaN. smallest: of those above 0, less 1.
struct Extent {
  u32 largest = 0, smallest = ~0u;
};
struct Extents {
  Extent rowwise, columnwise;
};
template <typename T> Q2_INLINE void exchange(T& one, T& other) {
  T was = one;
  one = other, other = was;
}

Q2_INLINE void finish(const Output& out, Extent extent) {
  if constexpr (kRule == EXACT || kRule == MX) return;
  extent.largest = block_largest<kThreads>(extent.largest);
  if (threadIdx.x == 0) out.largest[blockIdx.x] = extent.largest;
  if constexpr (!kCodes && kRawScales) {
    extent.smallest = ~block_largest<kThreads>(~extent.smallest);
    if (threadIdx.x == 0) out.largest[thread_blocks(out) + blockIdx.x] = extent.smallest;
  }
}

Q2_INLINE void finish(const Directions& of, const Extents& extents) {
  if (kRows) finish(of.rowwise, extents.rowwise);
  if (kCols) finish(of.columnwise, extents.columnwise);
}
