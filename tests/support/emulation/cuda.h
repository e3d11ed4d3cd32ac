// SPDX-License-Identifier: Apache-2.0
// Enough of CUDA to run one kernel on a CPU: threads of a block are coroutines in one OS thread,
// blocks run one after the other.
//
// Each coroutine runs to the next point where it waits for others and hands over. When all of a warp
// wait for its lanes (__syncwarp, a shuffle), the first goes on; when all warps have come to
// __syncthreads, those of all do. This is right for kernels in which every thread of a warp meets the
// same such points, and deterministic. It finds wrong results, not races.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

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

inline uint3 threadIdx, blockIdx, gridDim;

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
// A context starts a coroutine; later switches are jumps, since swapcontext is a system call.
struct Coroutine {
  ucontext_t context;
  jmp_buf at;
  bool begun;
  std::vector<char> stack;
  Wait waits;
  unsigned steps;
};
inline std::vector<Coroutine> coroutines;
inline jmp_buf scheduler;
inline unsigned exchanged[2][1024];
inline const void* addresses[1024];
inline std::function<void()> kernel_body;

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}

inline void hand_over(Wait waits) {
  Coroutine& own = coroutines[threadIdx.x];
  own.waits = waits;
  if (!_setjmp(own.at)) _longjmp(scheduler, 1);
}
inline void __syncthreads() {
  hand_over(FOR_BLOCK);
}
inline void __syncwarp() {
  hand_over(FOR_WARP);
}

// Two slots in turn: a coroutine is never more than one step ahead of another.
inline const unsigned* exchange(unsigned value) {
  unsigned* slots = exchanged[coroutines[threadIdx.x].steps++ & 1];
  slots[threadIdx.x] = value;
  __syncwarp();
  return slots;
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
inline bool __all_sync(unsigned, bool x) {
  const unsigned* lanes = exchange(x) + threadIdx.x / 32 * 32;
  for (int i = 0; i < 32; ++i) x = x && lanes[i];
  return x;
}
inline unsigned __vmaxu2(unsigned x, unsigned y) {
  return max(x >> 16, y >> 16) << 16 | max(x & 0xFFFF, y & 0xFFFF);
}

inline void coroutine_main() {
  kernel_body();
  hand_over(NO_MORE);
}

inline void resume(Coroutine& coroutine) {
  if (_setjmp(scheduler)) return;
  if (coroutine.begun) _longjmp(coroutine.at, 1);
  coroutine.begun = true;
  setcontext(&coroutine.context);
}

// Runs the threads of a warp that wait so, each to where it waits next; whether there were any.
inline bool run_warp(unsigned first, unsigned last, Wait waiting) {
  bool any = false;
  for (unsigned t = first; t < last; ++t) {
    if (coroutines[t].waits != waiting) continue;
    threadIdx = {t, 0, 0};
    resume(coroutines[t]);
    any = true;
  }
  return any;
}

inline void run_block(unsigned threads) {
  coroutines.resize(threads);
  for (auto& c : coroutines) {
    c.stack.resize(64 * 1024);
    c.waits = FOR_BLOCK;
    c.steps = 0;
    c.begun = false;
    getcontext(&c.context);
    c.context.uc_stack.ss_sp = c.stack.data();
    c.context.uc_stack.ss_size = c.stack.size();
    makecontext(&c.context, coroutine_main, 0);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (unsigned t = 0; t < threads; t += 32) {
      unsigned last = min(t + 32, threads);
      busy |= run_warp(t, last, FOR_BLOCK);
      while (run_warp(t, last, FOR_WARP)) {
      }
    }
  }
}
