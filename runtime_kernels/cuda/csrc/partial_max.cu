// SPDX-License-Identifier: Apache-2.0
// The largest raw scale of each thread block, for align_scales.cu. Raw scales are not negative; NaN is
// ignored.
//
//   raw_scale fp32 [n], 16-byte aligned
//   largest  u32, one a thread block: bits of the largest it saw, or 0
//
// Bytes per raw scale: 4 read.

#include "formats.cuh"

constexpr int kThreads = 256;

struct Params {
  const float* raw_scale;
  u32* largest;
  long long count;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in other_ops.py");

extern "C" __global__ void __launch_bounds__(kThreads) partial_max(const __grid_constant__ Params p) {
  allow_next_kernel();
  __shared__ u32 of_warp[kThreads / 32];
  float own = 0.0f;
  long long stride = (long long)gridDim.x * kThreads;
#pragma unroll 4
  for (long long i = blockIdx.x * (long long)kThreads + threadIdx.x; 4 * i < p.count; i += stride) {
    if (4 * i + 4 <= p.count) {
      float4 four = ((const float4*)p.raw_scale)[i];
      own = fmaxf(own, fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w)));
    } else {
      for (long long j = 4 * i; j < p.count; ++j) own = fmaxf(own, p.raw_scale[j]);
    }
  }
  u32 value = __reduce_max_sync(~0u, __float_as_uint(own));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kThreads / 32; ++i) value = max(value, of_warp[i]);
    p.largest[blockIdx.x] = value;
  }
}
