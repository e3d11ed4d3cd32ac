// Number formats and Philox, shared by the kernels of this folder.
//
// No header is included, so that NVRTC needs none. Compiled with --fmad=false: a product and a sum
// round one after the other unless fma says otherwise, as in the torch reference
// (runtime_kernels/nvfp4.py), whose bits these kernels reproduce.
#pragma once

// 1: the fp4 conversions of Blackwell; 0: the same numbers from float arithmetic and the fp8
// conversions of Hopper.
#ifndef Q2_HW_FP4
#error "define Q2_HW_FP4 as 0 or 1"
#endif

#include "ptx.cuh"

Q2_INLINE Pair from_bf16x2(u32 word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}

// Eight e2m1 codes to four words of two f16, each value times 2^-14. Word i holds codes i and i +
// 4, which lie 16 bits apart, so that one shift and mask serves both. e2m1 is sign, two exponent
// bits, one mantissa bit: its low three bits go to the lowest exponent bits and the highest
// mantissa bit of the f16, whose subnormals stand for e2m1's.
Q2_INLINE void e2m1x8_to_f16x2(u32 codes, u32 (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 top = codes << (12 - 4 * i);
    words[i] = (top & 0x80008000u) | ((top >> 3) & 0x0E000E00u);
  }
}

// Philox4x32-10 (runtime_kernels/philox.py): key = the seed, counter = (index, stream, purpose).

enum Purpose { SIGNS = 1, COINS = 2 };

// Blocks first, first + step, ... of one stream: their rounds share a key schedule.
template <int n>
Q2_INLINE void philox(u64 seed, u64 first, int step, u32 stream, Purpose purpose, uint4 (&c)[n]) {
  u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    u64 index = first + (u64)i * step;
    c[i] = {(u32)index, (u32)(index >> 32), stream, (u32)purpose};
  }
#pragma unroll
  for (int round = 0; round < 10; ++round) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      u64 product0 = (u64)c[i].x * 0xD2511F53u, product1 = (u64)c[i].z * 0xCD9E8D57u;
      c[i] = {(u32)(product1 >> 32) ^ c[i].y ^ k0, (u32)product1,
              (u32)(product0 >> 32) ^ c[i].w ^ k1, (u32)product0};
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}
