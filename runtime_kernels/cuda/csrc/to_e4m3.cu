// SPDX-License-Identifier: Apache-2.0
// MXFP4 codes to e4m3 elements under one power of two (ops/to_e4m3.py), in two launches:
//
//   Q2_LARGEST 1   the largest scale of each thread block, of kParts of them
//   Q2_LARGEST 0   the largest of those, the elements, and the scale of all
//
//   codes         u8 [M, Kp/2], even element in the low nibble; on 16 bytes, as the scales
//   scales        e8m0 [M, Kp/32] (Q2_SQUARE: [ceil(M/32), Kp/32], of blocks of 32x32)
//   global_scale  fp32
//   out           e4m3 [M, Kp]
//   out_scale     fp32: 2^(largest - 6) * global_scale
//   largest       u32 [kParts]: a byte of a scale plus 1; 0 where all are NaN
//
// A thread takes 16 codes, one 8-byte load, and writes 16 bytes. Bytes per element: .53 read and 1
// written, and .03 read by the first launch. The second launch may begin during the first, which has
// begun after all that wrote the codes and scales has ended: it reads those before it waits.

#include "formats.cuh"

constexpr bool kLargest = Q2_LARGEST;
constexpr bool kSquare = Q2_SQUARE;
constexpr int kThreads = 256;
constexpr int kParts = 128;
constexpr int kLeast = 7;  // of the largest scale, so that out_scale / global_scale is no subnormal

struct Params {
  const uint2* codes;
  const u8* scales;
  const float* global_scale;
  uint4* out;
  float* out_scale;
  u32* largest;
  long long scale_count;
  long long groups;  // of 16 codes
  int groups_across;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in other_ops.py");

Q2_INLINE u32 larger_scale(u32 largest, u32 byte) {
  return max(largest, (byte + 1) & 0xFF);
}

Q2_INLINE void find_largest(const Params& p) {
  allow_next_kernel();
  u32 own = 0;
  for (long long i = blockIdx.x * kThreads + threadIdx.x; 16 * i < p.scale_count;
       i += kParts * kThreads) {
    if (16 * i + 16 <= p.scale_count) {
      uint4 four = ((const uint4*)p.scales)[i];
#pragma unroll
      for (int j = 0; j < 32; j += 8) {
        own = larger_scale(larger_scale(own, four.x >> j & 0xFF), four.y >> j & 0xFF);
        own = larger_scale(larger_scale(own, four.z >> j & 0xFF), four.w >> j & 0xFF);
      }
    } else {
      for (long long j = 16 * i; j < p.scale_count; ++j) own = larger_scale(own, p.scales[j]);
    }
  }
  own = block_largest<kThreads>(own);
  if (threadIdx.x == 0) p.largest[blockIdx.x] = own;
}

// Eight codes to eight bytes. scale: of their block, over that of all.
Q2_INLINE uint2 to_e4m3x8(u32 codes, float scale) {
  float x[8];
  dequantized(codes, scale, 1.0f, x);
  return {to_e4m3x4(x[0], x[1], x[2], x[3]), to_e4m3x4(x[4], x[5], x[6], x[7])};
}

Q2_INLINE void write_elements(const Params& p) {
  long long group = blockIdx.x * (long long)kThreads + threadIdx.x;
  bool inside = group < p.groups;
  uint2 codes = {0, 0};
  u32 byte = 0;
  float global_scale = *p.global_scale;
  if (inside) {
    codes = p.codes[group];
    long long block = group / 2;
    if constexpr (kSquare) {  // elements are at most 2^36, so groups fit in 32 bits
      u32 row = (u32)group / (u32)p.groups_across, across = (u32)group % (u32)p.groups_across;
      block = (long long)(row / 32) * (p.groups_across / 2) + across / 2;
    }
    byte = p.scales[block];
  }
  await_previous_kernel();
  uint4 four = ((const uint4*)p.largest)[threadIdx.x % 32];
  int largest = (int)__reduce_max_sync(~0u, max(max(four.x, four.y), max(four.z, four.w))) - 1;
  largest = max(largest, kLeast);
  if (group == 0) *p.out_scale = global_scale * __uint_as_float((u32)(largest - 6) << 23);
  if (!inside) return;
  float scale = from_e8m0(byte) * __uint_as_float((u32)(254 + 6 - largest) << 23);
  uint2 low = to_e4m3x8(codes.x, scale), high = to_e4m3x8(codes.y, scale);
  p.out[group] = {low.x, low.y, high.x, high.y};
}

extern "C" __global__ void __launch_bounds__(kThreads) to_e4m3(const __grid_constant__ Params p) {
  if constexpr (kLargest) find_largest(p);
  else write_elements(p);
}
