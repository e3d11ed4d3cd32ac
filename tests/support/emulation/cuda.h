// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run one kernel on a CPU: threads of a block are coroutines in one OS thread,
// blocks run one after the other (threads.cpp).
//
// Each coroutine runs to the next point where it waits for others and hands over. When all of a warp
// wait for its lanes (__syncwarp, a shuffle), the first goes on; when all warps have come to
// __syncthreads, those of all do. This is right for kernels in which every thread of a warp meets the
// same such points, and deterministic. It finds wrong results, not races.
#pragma once
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__ static
#define __constant__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

struct alignas(8) uint2 {
  unsigned x, y;
};
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

// Defined in threads.cpp, which is compiled once for all kernels.
extern uint3 threadIdx, blockIdx, gridDim;
extern const void* addresses[1024];  // one of each thread, for ldmatrix

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
template <class To, class From>
To bit_cast(From x) {
  To y;
  static_assert(sizeof x == sizeof y);
  memcpy(&y, &x, sizeof y);
  return y;
}
inline unsigned __float_as_uint(float x) {
  return bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return bit_cast<float>(x);
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)(((uint64_t)a * b) >> 32);
}
// Byte i of the result is byte (selector >> 4 * i) & 7 of y:x.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  uint64_t both = (uint64_t)y << 32 | x;
  unsigned z = 0;
  for (int i = 0; i < 4; ++i)
    z |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return z;
}
inline float __fmaf_rn(float a, float b, float c) {
  return fmaf(a, b, c);
}
inline float __fmaf_rz(float a, float b, float c) {
  int before = fegetround();
  fesetround(FE_TOWARDZERO);
  volatile float x = a, y = b, z = c;  // not computed before the mode is set
  volatile float cut = fmaf(x, y, z);
  fesetround(before);
  return cut;
}
// In double the sum is exact but for bits that are lost here, too.
inline float __fadd_rz(float a, float b) {
  double sum = (double)a + b;
  float rounded = (float)sum;
  return fabs((double)rounded) > fabs(sum) ? nextafterf(rounded, 0.0f) : rounded;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __frcp_rn(float a) {
  return 1.0f / a;
}
inline float rsqrtf(float a) {
  return 1.0f / sqrtf(a);
}
template <class T>
T __ldg(const T* from) {
  return *from;
}

enum Wait { FOR_WARP, FOR_BLOCK, NO_MORE };
extern void hand_over(Wait waits);
// One value of each thread of the block: this thread's is written, those of its warp can be read.
extern const unsigned* exchange(unsigned value);
// Runs kernel(params) in every thread of every block.
extern void run_grid(
    void (*kernel)(const void*), const void* params, unsigned x, unsigned y, unsigned threads);

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}

inline void __syncthreads() {
  hand_over(FOR_BLOCK);
}
inline void __syncwarp() {
  hand_over(FOR_WARP);
}

inline float __shfl_xor_sync(unsigned, float x, int mask) {
  return __uint_as_float(exchange(__float_as_uint(x))[threadIdx.x ^ mask]);
}
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int mask) {
  return exchange(x)[threadIdx.x ^ mask];
}
// Lane `from` of each `width` lanes.
inline unsigned __shfl_sync(unsigned, unsigned x, int from, int width) {
  return exchange(x)[threadIdx.x / width * width + from];
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const unsigned* lanes = exchange(x) + threadIdx.x / 32 * 32;
  for (int i = 0; i < 32; ++i) x = max(x, lanes[i]);
  return x;
}
