// SPDX-License-Identifier: Apache-2.0
// How many of one instruction a multiprocessor executes in a cycle. One thread block per
// multiprocessor; each thread has eight chains, enough for the latency of any of them.
//
//   cycles   int64 [blocks], of `rounds` times 256 instructions of each thread
//   seed     numbers that the compiler does not know
#include "ptx.cuh"

constexpr int kThreads = 1024, kChains = 8;
constexpr int kOps = 256 / (Q2_RATE == 2 ? 4 : Q2_RATE == 3 ? 2 : 1);  // so many instructions each

struct Params {
  long long* cycles;
  u32* result;
  int rounds, seed;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in rates.py");

Q2_INLINE void operate(u64 (&x)[kChains], int i, u32 a, u32 b) {
  u32 z = (u32)x[i], y = (u32)x[(i + 1) % kChains];
#if Q2_RATE == 0
  asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+r"(z) : "r"(a), "r"(b));
#elif Q2_RATE == 1
  asm volatile("fma.rn.f32x2 %0, %0, %1, %1;" : "+l"(x[i]) : "l"((u64)a << 32 | b));
  return;
#elif Q2_RATE == 2
  asm volatile("{ .reg .b8 p, q, r, s; cvt.rn.satfinite.e2m1x2.f32 p, %0, %1; "
               "cvt.rn.satfinite.e2m1x2.f32 q, %2, %0; cvt.rn.satfinite.e2m1x2.f32 r, %0, %3; "
               "cvt.rn.satfinite.e2m1x2.f32 s, %3, %0; mov.b32 %0, {p, q, r, s}; }"
               : "+r"(z) : "r"(y), "r"(a), "r"(b));
#elif Q2_RATE == 3
  asm volatile("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %0, %1; "
               "cvt.rn.satfinite.e4m3x2.f32 h, %2, %0; mov.b32 %0, {l, h}; }"
               : "+r"(z) : "r"(a), "r"(b));
#elif Q2_RATE == 4
  asm volatile("add.rn.f16x2 %0, %0, %1;" : "+r"(z) : "r"(a));
#elif Q2_RATE == 5
  asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(z) : "r"(a), "r"(b));
#elif Q2_RATE == 6
  asm volatile("shfl.sync.bfly.b32 %0, %0, 1, 31, -1;" : "+r"(z));
#elif Q2_RATE == 7
  asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+r"(z));
#elif Q2_RATE == 8
  asm volatile("lop3.b32 %0, %0, %1, %2, 0x6a;" : "+r"(z) : "r"(a), "r"(y));
#else
  asm volatile("{ .reg .b32 t; add.u32 t, %0, %1; add.u32 %0, t, %2; }" : "+r"(z) : "r"(a), "r"(y));
#endif
  x[i] = z;
}

extern "C" __global__ void __launch_bounds__(kThreads) rates(const __grid_constant__ Params p) {
  u32 a = p.seed * 3 + threadIdx.x, b = p.seed * 5;
  u64 x[kChains];
#pragma unroll
  for (int i = 0; i < kChains; ++i) x[i] = a + i;
  __syncthreads();
  long long begin = clock64();
#pragma unroll 1
  for (int round = 0; round < p.rounds; ++round) {
#pragma unroll
    for (int i = 0; i < kOps; ++i) operate(x, i % kChains, a, b);
  }
  __syncthreads();
  long long end = clock64();
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < kChains; ++i) sum ^= (u32)x[i] ^ (u32)(x[i] >> 32);
  if (threadIdx.x == 0) p.cycles[blockIdx.x] = end - begin;
  if (sum == 0x12345678u) *p.result = sum;
}
