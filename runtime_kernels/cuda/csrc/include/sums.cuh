// SPDX-License-Identifier: Apache-2.0
// dbias: adds up the column sums of tiles that rotate_quantize.cu wrote (Q2_SUMS). This is done in the tail
// kernel, align_scales.cu or finalize_dequantized.cu, by thread blocks of their own: the first blockIdx.y.
//
//   partials  fp32 [tiles, pitch], columns <= pitch, pitch % 64 = 0
//   to        bf16, f16 or fp32 [columns]
//
// Order of operations: numerics/column_sums.py. Bytes: 4 read for 128 elements of the matrix.
#pragma once
#include "formats.cuh"

constexpr int kMaxSums = 4;

struct Sums {
  const float* partials;
  void* to;
  int tiles, columns, pitch;
  int type;  // of `to`: 0 bf16, 1 f16, 2 fp32
};

// All threads of a thread block. A warp adds every eighth tile of 32 columns, then one adds the
// warps' sums.
template <int kThreads>
Q2_INLINE void add_up(const Sums& sums) {
  constexpr int kWarps = kThreads / 32, kAhead = 8;  // loads on their way at once
  static_assert(kWarps == 8, "the reference has as many strands");
  __shared__ float of_warp[kWarps][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = 32 * blockIdx.x; first < sums.columns; first += 32 * gridDim.x) {
    const float* at = sums.partials + first + lane;
    float sum = 0.0f;
    for (int tile = warp; tile < sums.tiles; tile += kWarps * kAhead) {
      float loaded[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        int row = tile + kWarps * i;
        loaded[i] = row < sums.tiles ? at[(long long)row * sums.pitch] : 0.0f;
      }
#pragma unroll
      for (float number : loaded) sum += number;
    }
    of_warp[warp][lane] = sum;
    __syncthreads();
    int column = first + lane;
    if (warp == 0 && column < sums.columns) {
#pragma unroll
      for (int i = 1; i < kWarps; ++i) sum += of_warp[i][lane];
      if (sums.type == 2) ((float*)sums.to)[column] = sum;
      else if (sums.type == 1) ((u16*)sums.to)[column] = (u16)to_f16x2(sum, 0.0f);
      else ((u16*)sums.to)[column] = (u16)to_bf16x2(sum, 0.0f);
    }
    __syncthreads();
  }
}
