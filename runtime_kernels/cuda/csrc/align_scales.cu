// SPDX-License-Identifier: Apache-2.0
// The tail kernel of a quantizer: makes block scales and the global scale from the raw scales of
// rotate_quantize.cu. It is the second phase of MS-EDEN (post-hoc range alignment) and of schemes with
// a power-of-two global scale. For mxfp4 it writes the global scale alone.
//
//   raw_scale  fp32 [n]: the block scale of block i before `factor` and the global scale;
//            Q2_INTERLEAVED: the order within eight is 0 4 1 5 2 6 3 7
//   largest  u32 [parts]: bits of the largest raw scale of each thread block of rotate_quantize.cu,
//            NaN left out
//   out      scales e4m3 [n], global_scale fp32
//
//   factor = norm of the rotation, times the global scale of the source where there is one (MS-EDEN;
//            the other schemes applied it in rotate_quantize.cu)
//   g      = max(raw_scale) * factor / 256                                    Q2_POW2 = 0
//            the smallest 2^k with max(raw_scale) * factor / 2^k <= cap       Q2_POW2 = 1
//   scale  = SR_e4m3(raw_scale * factor / g), in the subnormals too; random bits i are word i % 4 of
//            Philox block i / 4 (Q2_STOCHASTIC = 1, cap 256), or the nearest (0, cap 448)
//
// All zeros: g = 1. A raw scale of NaN, of a poisoned block (numerics/blocks.py): a scale of NaN.
// factor NaN, or max(raw_scale) * factor Inf: g and all scales NaN.
//
// One launch serves up to kMaxOperands operands (blockIdx.y): a matrix rowwise and columnwise, or the
// two operands of a GEMM, for which it also writes the product of the global scales. A thread makes
// eight scales. It draws their random bits while rotate_quantize.cu is still running. Bytes per block:
// 4 read, 1 written.
//
// Q2_MX: there are no raw scales (n = 0), nothing is read of `largest`, and g is `norm`.
// Q2_SWIZZLED: the scales of rows of `blocks` in the 32x4x4 layout (numerics/swizzle.py), with
// zeros for the rows and blocks that fill the last tiles. A thread has eight blocks of one row then.
// Q2_SUMS: makes dbias as well (sums.cuh).

#include "scales.cuh"

// Four scales of consecutive blocks as four bytes.
Q2_INLINE u32 stochastic_e4m3x4(const float (&x)[4], uint4 random_bits) {
  u32 drawn[4] = {random_bits.x, random_bits.y, random_bits.z, random_bits.w}, bytes = 0;
  if (min_or_nan(min_or_nan(x[0], x[1]), min_or_nan(x[2], x[3])) >= 0x1p-6f) {
#pragma unroll
    for (int j = 0; j < 4; ++j) bytes |= stochastic_normal(x[j], drawn[j]) << (8 * j);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) bytes |= stochastic_e4m3(x[j], drawn[j]) << (8 * j);
  }
  return bytes;
}

// The blocks of one thread: i .. i + 7, of which n exist.
struct Octet {
  long long i;
  int n;
  int row, block, rows;  // Q2_SWIZZLED: of the first block, and all rows, padding included
};

// The number of blocks in a row is a multiple of 8 where they are interleaved, and else any.
constexpr bool kRagged = Q2_SWIZZLED && !Q2_INTERLEAVED;

Q2_INLINE Octet octet_at(const Operand& operand, long long index) {
#if Q2_SWIZZLED
  int blocks = operand.blocks;
  int across = (blocks + 7) / 8, rows = (int)(operand.count / blocks);
  int row = (int)(index / across), block = (int)(index % across) * 8;
  return {(long long)row * blocks + block, row < rows ? min(blocks - block, 8) : 0, row, block,
          (rows + 127) / 128 * 128};
#else
  return {8 * index, (int)max(min(operand.count - 8 * index, 8ll), 0ll), 0, 0, 0};
#endif
}

// Drops the first `n` < 4 of twelve random bits.
Q2_INLINE void drop_first(int n, uint4 (&c)[3]) {
#pragma unroll
  for (int q = 0; q < 3; ++q) {
    uint4 next = q < 2 ? c[q + 1] : uint4{0, 0, 0, 0};
    if (n & 1) c[q] = {c[q].y, c[q].z, c[q].w, next.x};
  }
#pragma unroll
  for (int q = 0; q < 3; ++q) {
    uint4 next = q < 2 ? c[q + 1] : uint4{0, 0, 0, 0};
    if (n & 2) c[q] = {c[q].z, c[q].w, next.x, next.y};
  }
}

// The random bits of an octet, which need not begin where a Philox block does.
Q2_INLINE void draw(const Operand& operand, const Octet& octet, uint4 (&random_bits)[2]) {
  if constexpr (kRagged) {
    uint4 drawn[3];
    philox(*operand.seed, (u64)octet.i / 4, operand.rng_offset, RANDOM_BITS, drawn);
    drop_first((int)octet.i & 3, drawn);
    random_bits[0] = drawn[0], random_bits[1] = drawn[1];
  } else {
    philox(*operand.seed, (u64)octet.i / 4, operand.rng_offset, RANDOM_BITS, random_bits);
  }
}

Q2_INLINE void load_eight(const Operand& operand, const Octet& octet, float (&x)[8]) {
  long long i = octet.i;
  if (octet.n == 8 && (!kRagged || i % 4 == 0)) {
    float4 v0 = *(const float4*)(operand.raw_scale + i), v1 = *(const float4*)(operand.raw_scale + i + 4);
#if Q2_INTERLEAVED
    x[0] = v0.x, x[4] = v0.y, x[1] = v0.z, x[5] = v0.w;
    x[2] = v1.x, x[6] = v1.y, x[3] = v1.z, x[7] = v1.w;
#else
    x[0] = v0.x, x[1] = v0.y, x[2] = v0.z, x[3] = v0.w;
    x[4] = v1.x, x[5] = v1.y, x[6] = v1.z, x[7] = v1.w;
#endif
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = j < octet.n ? operand.raw_scale[i + j] : 0.0f;
  }
}

#if Q2_SWIZZLED
// Eight scales of one row are words of two neighboring tiles, if there is a second.
Q2_INLINE void store_eight(const Operand& operand, const Octet& octet, const u32 (&bytes)[2]) {
  int across = (operand.blocks + 3) / 4;
  u32* out = (u32*)(operand.scales + swizzled_at(octet.row, octet.block, across));
  out[0] = bytes[0];
  if (octet.block / 4 + 1 < across) out[128] = bytes[1];
}
#endif

// By one thread block of each operand. It recomputes the partner's global scale instead of waiting for it.
Q2_INLINE void write_global_scales(const Params& p, const Operand& operand, float global_scale) {
  if (threadIdx.x == 0) *operand.global_scale = global_scale;
  if (!operand.product) return;
  float other;
  if (operand.partner >= 0) {
    const Operand& partner = p.operands[operand.partner];
    other = global_scale_of(partner, factor_of(partner));
  } else {
    other = *operand.other;
  }
  if (threadIdx.x == 0) *operand.product = global_scale * other;
}

// The scales of an octet.
Q2_INLINE void make_eight(const Operand& operand, const Octet& octet, float factor, float global_scale,
                          [[maybe_unused]] const uint4 (&random_bits)[2]) {
  float x[8];
  u32 bytes[2];
  load_eight(operand, octet, x);
  [[maybe_unused]] float inverse = __frcp_rn(global_scale);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float raw_scale = x[j] * factor;
#if Q2_POW2
    x[j] = raw_scale * inverse;  // exact, as the quotient would be
#else
    x[j] = __fdiv_rn(raw_scale, global_scale);
#endif
    x[j] = min_or_nan(x[j], 448.0f);
  }
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    float quad[4] = {x[4 * q], x[4 * q + 1], x[4 * q + 2], x[4 * q + 3]};
    if constexpr (Q2_STOCHASTIC) bytes[q] = stochastic_e4m3x4(quad, random_bits[q]);
    else bytes[q] = to_e4m3x4(quad[0], quad[1], quad[2], quad[3]);
  }
#if Q2_SWIZZLED
  store_eight(operand, octet, bytes);
#else
  if (octet.n == 8) {
    *(uint2*)(operand.scales + octet.i) = {bytes[0], bytes[1]};
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (j < octet.n) operand.scales[octet.i + j] = (u8)(bytes[j / 4] >> (8 * (j % 4)));
  }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads)
    align_scales(const __grid_constant__ Params p) {
  if (adds_up(p)) return;
  const Operand& operand = operand_of(p);
  Octet octet = octet_at(operand, blockIdx.x * (long long)kThreads + threadIdx.x);
  [[maybe_unused]] uint4 random_bits[2];
  if constexpr (Q2_STOCHASTIC) draw(operand, octet, random_bits);
  await_previous_kernel();  // nothing of rotate_quantize.cu has been read up to here
  float factor = factor_of(operand), global_scale = global_scale_of(operand, factor);
  if (blockIdx.x == 0) write_global_scales(p, operand, global_scale);
  if (Q2_SWIZZLED ? octet.row < octet.rows : octet.n > 0)
    make_eight(operand, octet, factor, global_scale, random_bits);
}
