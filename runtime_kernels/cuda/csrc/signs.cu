// SPDX-License-Identifier: Apache-2.0
// The diagonal of a randomized Hadamard transform (numerics/transforms.py:signs_of): of one Philox
// block bit j % 32 of word j / 32 is set where sign j is -1.
//
//   seed  s64
//   out   fp32 [size], size <= 128
//
// One thread block, a thread a sign.

#include "formats.cuh"

constexpr int kThreads = 128;

struct Params {
  const u64* seed;
  float* out;
  int size;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in other_ops.py");

extern "C" __global__ void __launch_bounds__(kThreads) signs(const __grid_constant__ Params p) {
  int j = threadIdx.x;
  if (j >= p.size) return;
  uint4 block[1];
  philox(*p.seed, 0u, 0, SIGNS, block);
  p.out[j] = word_of(block, j / 32) >> (j % 32) & 1 ? -1.0f : 1.0f;
}
