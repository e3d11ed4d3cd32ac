// SPDX-License-Identifier: Apache-2.0
// Every instruction that C++ cannot name, one function each. Nothing else in this folder contains
// inline PTX, so that a test can put plain C++ in this file's place and run the kernels on a CPU
// (tests/support/emulation/ptx.cuh).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define Q2_INLINE __device__ __forceinline__

// Two values that go through the same arithmetic. sm_100 has one instruction for both (FADD2,
// FMUL2, FFMA2); the others two.
struct Pair {
  float a, b;
};

Q2_INLINE Pair both(float x) {
  return {x, x};
}

#if __CUDA_ARCH__ >= 1000
Q2_INLINE u64 packed(Pair x) {
  u64 z;
  asm("mov.b64 %0, {%1, %2};" : "=l"(z) : "f"(x.a), "f"(x.b));
  return z;
}
Q2_INLINE Pair unpacked(u64 x) {
  Pair z;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(z.a), "=f"(z.b) : "l"(x));
  return z;
}
Q2_INLINE Pair add(Pair x, Pair y) {
  u64 z;
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(z) : "l"(packed(x)), "l"(packed(y)));
  return unpacked(z);
}
Q2_INLINE Pair mul(Pair x, Pair y) {
  u64 z;
  asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(z) : "l"(packed(x)), "l"(packed(y)));
  return unpacked(z);
}
Q2_INLINE Pair fma(Pair x, Pair y, Pair w) {
  u64 z;
  asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(z) : "l"(packed(x)), "l"(packed(y)), "l"(packed(w)));
  return unpacked(z);
}
// Cut instead of rounded.
Q2_INLINE Pair fma_toward_zero(Pair x, Pair y, Pair w) {
  u64 z;
  asm("fma.rz.f32x2 %0, %1, %2, %3;" : "=l"(z) : "l"(packed(x)), "l"(packed(y)), "l"(packed(w)));
  return unpacked(z);
}
// There is no packed subtraction; x + (-1) * y rounds once, to the same value.
Q2_INLINE Pair sub(Pair x, Pair y) {
  return fma(y, both(-1.0f), x);
}
#else
Q2_INLINE Pair add(Pair x, Pair y) {
  return {x.a + y.a, x.b + y.b};
}
Q2_INLINE Pair sub(Pair x, Pair y) {
  return {x.a - y.a, x.b - y.b};
}
Q2_INLINE Pair mul(Pair x, Pair y) {
  return {x.a * y.a, x.b * y.b};
}
Q2_INLINE Pair fma(Pair x, Pair y, Pair w) {
  return {__fmaf_rn(x.a, y.a, w.a), __fmaf_rn(x.b, y.b, w.b)};
}
// Cut instead of rounded.
Q2_INLINE Pair fma_toward_zero(Pair x, Pair y, Pair w) {
  return {__fmaf_rz(x.a, y.a, w.a), __fmaf_rz(x.b, y.b, w.b)};
}
#endif

// 1 and -1, which ptxas does not know: it would put them into two registers for every few uses.
__constant__ Pair one_and_minus_one = {1.0f, -1.0f};

// The sum and the difference of the two: one instruction on sm_100.
Q2_INLINE Pair sum_and_difference(Pair x) {
#if __CUDA_ARCH__ >= 1000
  return fma(both(x.b), one_and_minus_one, both(x.a));
#else
  return {x.a + x.b, x.a - x.b};
#endif
}

// One instruction, which C++ with numbers of 64 bits does not always become.
Q2_INLINE u64 mul_wide(u32 x, u32 y) {
  u64 z;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(z) : "r"(x), "r"(y));
  return z;
}

// About 1 / x, to 1 ulp or so; subnormals count as 0.
Q2_INLINE float approximate_reciprocal(float x) {
  float z;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(x));
  return z;
}

// About 2^x, where what is subnormal counts as 0; and a / b to 2 ulp, 0 for b beyond 2^126.
Q2_INLINE float approximate_exp2(float x) {
  float z;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(x));
  return z;
}
Q2_INLINE float divide_full(float a, float b) {
  float z;
  asm("div.full.f32 %0, %1, %2;" : "=f"(z) : "f"(a), "f"(b));
  return z;
}

// The larger or the smaller, or NaN where one of them is.
Q2_INLINE float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

Q2_INLINE float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

// x, or the limit with the sign of x where that is smaller.
Q2_INLINE float within(float x, float limit) {
#if __CUDA_ARCH__ >= 860
  float z;
  asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(limit));
  return z;
#else
  return copysignf(fminf(fabsf(x), limit), x);
#endif
}

// Words of two 16-bit floats, the first in the lower half.

Q2_INLINE Pair from_f16x2(u32 word) {
  Pair z;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(z.a), "=f"(z.b)
      : "r"(word));
  return z;
}

Q2_INLINE u32 mul_f16x2(u32 x, u32 y) {
  u32 z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

Q2_INLINE u32 fma_f16x2(u32 x, u32 y, u32 w) {
  u32 z;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(w));
  return z;
}
Q2_INLINE u32 max_f16x2(u32 x, u32 y) {
  u32 z;
  asm("max.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
Q2_INLINE u32 min_f16x2(u32 x, u32 y) {
  u32 z;
  asm("min.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}

Q2_INLINE u32 to_bf16x2(float low, float high) {
  u32 z;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(high), "f"(low));
  return z;
}

// Two products of bf16, each rounded once. (sm_80 has only the fused multiply-add; -0 keeps signs.)
Q2_INLINE u32 mul_bf16x2(u32 x, u32 y) {
  u32 z;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(z) : "r"(x), "r"(y), "r"(0x80008000u));
  return z;
}

// Two bf16 as fp32, each times the bf16 in the upper half of its sign, 1 or -1; the lower half is 0. By
// multiply-adds, whose pipe has more room than that of shifts and masks; infinities become NaN. -0 is
// added, which keeps the sign of 0, and 0 below it: of a constant that ptxas knows it would make
// those anew each time.
__constant__ u32 zero_below_minus_zero = 0x80000000u;
Q2_INLINE Pair signed_bf16x2(u32 word, u32 sign_low, u32 sign_high) {
  u32 a, b;
  asm("{ .reg .b16 l, h; .reg .b32 ll, hh; mov.b32 {l, h}, %2; mov.b32 ll, {l, l}; mov.b32 hh, {h, "
      "h}; fma.rn.bf16x2 %0, ll, %3, %5; fma.rn.bf16x2 %1, hh, %4, %5; }"
      : "=r"(a), "=r"(b)
      : "r"(word), "r"(sign_low), "r"(sign_high), "r"(zero_below_minus_zero));
  return {__uint_as_float(a), __uint_as_float(b)};
}

// Two bf16 (or f16) as fp32, each times one of `signs`, 1 or -1: from sm_100 on one instruction each. -0
// is added, which keeps the sign of 0.
Q2_INLINE Pair times_signs_bf16x2(u32 word, u32 signs) {
#if __CUDA_ARCH__ >= 1000
  Pair z;
  asm("{ .reg .b16 l, h, m, n; mov.b32 {l, h}, %2; mov.b32 {m, n}, %3; fma.rn.f32.bf16 %0, l, m, "
      "0f80000000; fma.rn.f32.bf16 %1, h, n, 0f80000000; }"
      : "=f"(z.a), "=f"(z.b)
      : "r"(word), "r"(signs));
  return z;
#else
  return {__uint_as_float(word << 16) * __uint_as_float(signs << 16),
          __uint_as_float(word & 0xFFFF0000u) * __uint_as_float(signs & 0xFFFF0000u)};
#endif
}
Q2_INLINE Pair times_signs_f16x2(u32 word, u32 signs) {
#if __CUDA_ARCH__ >= 1000
  Pair z;
  asm("{ .reg .b16 l, h, m, n; mov.b32 {l, h}, %2; mov.b32 {m, n}, %3; fma.rn.f32.f16 %0, l, m, "
      "0f80000000; fma.rn.f32.f16 %1, h, n, 0f80000000; }"
      : "=f"(z.a), "=f"(z.b)
      : "r"(word), "r"(signs));
  return z;
#else
  return mul(from_f16x2(word), from_f16x2(signs));
#endif
}

// An fp32, plus the first and then the second of two bf16 (or f16): from sm_100 on one instruction each.
Q2_INLINE float plus_bf16x2(float x, u32 word) {
#if __CUDA_ARCH__ >= 1000
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; add.rn.f32.bf16 %0, l, %0; add.rn.f32.bf16 %0, h, %0; }"
      : "+f"(x)
      : "r"(word));
  return x;
#else
  return x + __uint_as_float(word << 16) + __uint_as_float(word & 0xFFFF0000u);
#endif
}
Q2_INLINE float plus_f16x2(float x, u32 word) {
#if __CUDA_ARCH__ >= 1000
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; add.rn.f32.f16 %0, l, %0; add.rn.f32.f16 %0, h, %0; }"
      : "+f"(x)
      : "r"(word));
  return x;
#else
  Pair two = from_f16x2(word);
  return x + two.a + two.b;
#endif
}

// Two f16, less two fp32: from sm_100 on one instruction each.
Q2_INLINE Pair f16x2_minus(u32 word, float a, float b) {
#if __CUDA_ARCH__ >= 1000
  Pair z;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; sub.f32.f16 %0, l, %3; sub.f32.f16 %1, h, %4; }"
      : "=f"(z.a), "=f"(z.b)
      : "r"(word), "f"(a), "f"(b));
  return z;
#else
  return sub(from_f16x2(word), {a, b});
#endif
}

// Loads elements (2 * (lane % 4), lane / 4), and those below, of four 8x8 matrices of f16 in shared
// memory. Lanes 0 to 7 pass the addresses of the first one's rows of 16 bytes, 8 to 15 the next one's.
Q2_INLINE void load_transposed(const u8* shared, u32 (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"((u32)__cvta_generic_to_shared(shared))
               : "memory");
}

Q2_INLINE u32 to_f16x2(float low, float high) {
  u32 z;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(high), "f"(low));
  return z;
}

#if Q2_HW_FP8
// Two bytes of e4m3 (the lower 16 bits) as two f16: exact.
Q2_INLINE u32 e4m3x2_to_f16x2(u32 bytes) {
  u32 z;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.rn.f16x2.e4m3x2 %0, l; }" : "=r"(z) : "r"(bytes));
  return z;
}

// Four floats as four bytes of e4m3 (nearest even, saturating, the sign of zero kept), the first in
// the lowest byte.
Q2_INLINE u32 to_e4m3x4(float x0, float x1, float x2, float x3) {
  u32 z;
  asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1; cvt.rn.satfinite.e4m3x2.f32 h, %4, "
      "%3; mov.b32 %0, {l, h}; }"
      : "=r"(z)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return z;
}
#endif

#if Q2_HW_FP4
// Eight floats to eight e2m1 codes (nearest even, saturating, the sign of zero kept), the first in
// the lowest nibble.
Q2_INLINE u32 to_e2m1x8(const float (&x)[8]) {
  u32 z;
  asm("{ .reg .b8 p, q, r, s; cvt.rn.satfinite.e2m1x2.f32 p, %2, %1; cvt.rn.satfinite.e2m1x2.f32 "
      "q, %4, %3; "
      "cvt.rn.satfinite.e2m1x2.f32 r, %6, %5; cvt.rn.satfinite.e2m1x2.f32 s, %8, %7; mov.b32 %0, "
      "{p, q, r, s}; }"
      : "=r"(z)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return z;
}

// Eight e2m1 codes to four words of two f16: word i has codes 2 * i and 2 * i + 1.
Q2_INLINE void from_e2m1x8(u32 codes, u32 (&words)[4]) {
  asm("{ .reg .b8 p, q, r, s; mov.b32 {p, q, r, s}, %4; cvt.rn.f16x2.e2m1x2 %0, p; "
      "cvt.rn.f16x2.e2m1x2 %1, q; "
      "cvt.rn.f16x2.e2m1x2 %2, r; cvt.rn.f16x2.e2m1x2 %3, s; }"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "r"(codes));
}
#endif

// Starts copying 16 bytes from global to shared memory. Without a cache hint: with one (L2 to give up
// the lines first) NVRTC 13.0 encoded the descriptor in an odd register for sm_90a, an illegal
// instruction on an H200.
Q2_INLINE void copy_async(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   (u32)__cvta_generic_to_shared(shared)),
               "l"(global)
               : "memory");
}

Q2_INLINE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until all that this thread has committed has arrived.
Q2_INLINE void await_copies() {
  asm volatile("cp.async.wait_group 0;" ::: "memory");
}

// For a launch that may begin before the kernel ahead of it in the stream has ended (from sm_90 on):
// waits for that end, and for all it wrote. Without such a launch it does nothing.
Q2_INLINE void await_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets such a launch begin as soon as every thread block has said so.
Q2_INLINE void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
