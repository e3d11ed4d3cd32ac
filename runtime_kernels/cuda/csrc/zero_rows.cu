// SPDX-License-Identifier: Apache-2.0
// Writes zeros into the rows of a grouped GEMM's result that are in no group. torch._grouped_mm does not
// write them.
//
//   ends  int32 [groups], of the groups; the rows of no group begin at the last of them
//   out   [rows, row_bytes], row_bytes a multiple of 16
//
// Usually there are no such rows, and nothing is written.

#include "formats.cuh"

constexpr int kThreads = 256;

struct Params {
  u8* out;
  const int* ends;
  long long bytes, row_bytes;
  int groups;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in grouped_mm.py");

extern "C" __global__ void __launch_bounds__(kThreads) zero_rows(const __grid_constant__ Params p) {
  long long first = p.ends[p.groups - 1] * p.row_bytes;
  long long stride = (long long)gridDim.x * kThreads * 16;
  for (long long at = first + (blockIdx.x * (long long)kThreads + threadIdx.x) * 16; at < p.bytes;
       at += stride)
    *(uint4*)(p.out + at) = {0, 0, 0, 0};
}
