// SPDX-License-Identifier: Apache-2.0
// The largest and the smallest of what a thread block of rotate_quantize.cu has stored, for the
// kernel that comes after it.
#pragma once
#include "rounding.cuh"

// Of what a direction has stored, but for NaN; smallest: of what is not 0, less 1.
struct Extent {
  u32 largest = 0, smallest = ~0u;
};
struct Extents {
  Extent along_rows, along_cols;
};
Q2_INLINE void exchange(Extents& one, Extents& other) {
  Extents was = one;
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
  if (kRows) finish(of.along_rows, extents.along_rows);
  if (kCols) finish(of.along_cols, extents.along_cols);
}
