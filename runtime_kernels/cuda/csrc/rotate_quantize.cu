// SPDX-License-Identifier: Apache-2.0
// Rotates and quantizes a matrix rowwise, columnwise, or both from one read. The kernel behind
// q2::quantize and q2::requantize. The tail kernel, align_scales.cu, finishes the block scales.
//
//   x           [M, K], row-major with a pitch: bf16, f16, fp32; or codes u8 [M, Kp/2] with block
//               scales, nvfp4 or mxfp4 (requantize); or bf16 with such scales (round_to_scales.cuh)
//   rowwise     contraction K, Kp = K padded to whole chunks: codes u8 [M, Kp/2], scales [M, Kp/16]
//   columnwise  contraction M, Mp = M padded to whole chunks: codes u8 [K, Mp/2], scales [K, Mp/16]
//   scales      raw scales, fp32 (MS_EDEN, POW2); e4m3 (EXACT); e8m0, one for 32 (MX); none (AMAX).
//               Q2_SWIZZLED: those of EXACT and MX in the 32x4x4 layout (numerics/swizzle.py), with
//               zeros to the end of the last tiles, which the tiles of x cover
//   mask        Q2_MASKED: u32 [M, Kp/32], one bit per element, least significant bit first
//   largest     u32, one per thread block: bits of its largest raw scale (AMAX: of the largest rotated
//               element of a finite block; MX: not written). NaN, of poisoned blocks, is left out
//               (numerics/blocks.py)
//   sums        Q2_SUMS: fp32 [ceil(M/128), K in whole tiles], column sums of 128 rows each, for dbias
//
//   Q2_GROUPED     columnwise by groups of rows, each padded to whole tiles (groups.cuh): Mp is then
//                  that of the padded layout, which `tiles` covers
//   Q2_PROLOGUE    x is computed by a prologue expression (prologue.cuh) instead of read
//   Q2_ROTATES_ROWS  0: only the columnwise operand is rotated
//   Q2_OPERANDS    2: x stands for two matrices, from one read, each with outputs and seeds of its own
//   Q2_BATCH       a batched launch: blockIdx.y is the matrix, each has thread blocks of its own
//   Q2_DEQUANTIZED dequantized operands, bf16 [M, Kp] and [K, Mp], instead of codes and scales
//                  (dequantized.cuh); `largest` is followed by the smallest raw scale above 0, less 1
//
// For each chunk of Q2_SIZE along the contraction u = H (x * D): H of +-1 (the norm is applied later),
// D the signs drawn from the seed. Blocks of 16 or 32 of u are then rounded by the rule Q2_RULE
// (rounding.cuh). Byte k/2 of a row of codes holds element k, in its low nibble for even k.
//
// Tiles. A thread block walks over tiles of 128x128 (128x64 if only columnwise). If shared memory has
// room for two (Q2_STAGES), the next tile is copied while this one is quantized.
//
// Registers. A thread holds 64 elements, four whole blocks of 16: half a row or half a column of a tile
// (lines.cuh). Blocks are worked on in pairs. Bits 0 to 3 of an element's index in a chunk of 128 count within a block, so
// butterflies of h = 1, 2, 4, 8 stay in registers, as do those of 16 and 64; h = 32 goes between two
// lanes. In chunks of 128 those of 32 stay, and for 64 lanes swap half of their elements (kSwaps).
//
// Order of operations: numerics/transforms.py:hadamard. Rounding: nearest even. The bits equal the
// reference's for |u| < 2^120; above that the factor of x is an fp32 subnormal on Hopper.
// Bytes per element, bf16 source: 2 read, .75 written rowwise and columnwise each (EXACT, MX: .56, .53;
// dequantized: 2.25, EXACT, MX: 2); nvfp4 source: .5625 read.

#include "extents.cuh"
#include "lines.cuh"
#include "round_to_scales.cuh"
#include "stores.cuh"
#include "tail.cuh"
#include "dequantized.cuh"

extern __shared__ __align__(16) u8 shared_tiles[];

// -------------------------------------------------------------------------------------------------
// Rotation and quantization of the elements of one thread

// The larger of two non-negative floats, as bits; NaN is ignored.
Q2_INLINE u32 larger_bits(u32 x, float y) {
  return __float_as_uint(fmaxf(__uint_as_float(x), y));
}

// first: index of the first Philox block of random bits. share: of groups.cuh. x becomes what the codes
// stand for, in kUnit.
template <bool kColumns>
Q2_INLINE void round_groups(Pair (&x)[2][16], const Common& common, const Output& out, u32 first,
                            Results& results, Extent& extent, [[maybe_unused]] float share) {
  if constexpr (kRule == MS_EDEN) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      Pair raw_scale = ms_eden(x[group], results.codes[group]);
      if constexpr (kColumns && kSpread) raw_scale = mul(raw_scale, both(share));
      results.stored[group][0] = __float_as_uint(raw_scale.a);
      results.stored[group][1] = __float_as_uint(raw_scale.b);
    }
  } else {
    Pair most[2] = {largest_of_block(x[0]), largest_of_block(x[1])};
    if constexpr (kRule == MX)  // a block of 32 lies in both groups
      most[0] = most[1] = {max_or_nan(most[0].a, most[1].a), max_or_nan(most[0].b, most[1].b)};
    if constexpr (kRule == AMAX) {
#pragma unroll
      for (Pair m : most) {
        m = fma(m, both(0.0f), m);  // Inf becomes NaN, too
        extent.largest = larger_bits(larger_bits(extent.largest, m.a), m.b);
      }
      return;
    }
    if constexpr (kMasked && !kColumns) {  // a mask is made rowwise alone
      uint2 stored = round_trusting(x, most[0], common, results.codes, results.trusted);
      results.stored[0][0] = stored.x, results.stored[0][1] = stored.y;
      return;
    }
    constexpr int kGroup = kSwaps ? 8 : 2, kMember = kSwaps ? 2 : 8;  // Philox blocks to the next
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      u32 at[2] = {first + group * kGroup, first + group * kGroup + kMember};
      uint2 stored = round_blocks(x[group], most[group], common, out, at, results.codes[group]);
      results.stored[group][0] = stored.x, results.stored[group][1] = stored.y;
    }
  }
  if constexpr (kRawScales) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 raw_scale = results.stored[i / 2][i % 2];
      extent.largest = larger_bits(extent.largest, __uint_as_float(raw_scale));
      extent.smallest = min(extent.smallest, raw_scale - 1);  // NaN is above all
    }
  }
}

// Second members of first pairs and first members of second pairs, for what takes groups as neighbors.
Q2_INLINE void exchange_members(Pair (&x)[2][16], Results& made) {
#pragma unroll
  for (int i = 0; i < 16; ++i) exchange(x[0][i].b, x[1][i].a);
#pragma unroll
  for (int i = 0; i < 2; ++i) exchange(made.codes[0][1][i], made.codes[1][0][i]);
  exchange(made.stored[0][1], made.stored[1][0]);
}

// First Philox block of the elements of a block of 16, which takes two (plan.py refuses operands too
// large for 32 bits).
Q2_INLINE u32 random_at(const Output& out, int row, int block) {
  return 2 * ((u32)row * out.blocks + block);
}

// Stores the codes, scales and masks of a line: row `row` of the result, from block `first` on.
template <bool kColumns>
Q2_INLINE void store_line(const Params& p, const Output& out, int row, int first, const Results& made) {
  first += 2 * (threadIdx.x % 2);
  Target target = target_at(out, row, first);
  if constexpr (kInterleaved) {
    if (target.left <= 0) return;
#pragma unroll
    for (int half = 0; half < 2 && kCodes; ++half)
      *(uint4*)(target.codes + 4 * half * 8) = {made.codes[0][half][0], made.codes[0][half][1],
                                                made.codes[1][half][0], made.codes[1][half][1]};
    *four_raw_scales(out, target) = {made.stored[0][0], made.stored[0][1], made.stored[1][0],
                                     made.stored[1][1]};
  } else {
    if (out.blocks % 4 == 0) {  // whole sectors
      if constexpr (kRawScales) store_four_raw_scales(out, target, made);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_two(target, 4 * half, made.codes[0][half], made.codes[1][half],
                  made.stored[0][half], made.stored[1][half]);
    } else {
      const auto& codes = made.codes;
#pragma unroll 1
      for (int i = 0; i < 4; ++i) {  // a loop, for short code
        bool group = i % 2, half = i / 2;
        auto of = [&](u32 a, u32 b, u32 c, u32 d) { return group ? (half ? d : c) : (half ? b : a); };
        u32 block[2] = {of(codes[0][0][0], codes[0][1][0], codes[1][0][0], codes[1][1][0]),
                        of(codes[0][0][1], codes[0][1][1], codes[1][0][1], codes[1][1][1])};
        u32 stored = of(made.stored[0][0], made.stored[0][1], made.stored[1][0], made.stored[1][1]);
        store(target, 4 * half + group, block, stored);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int block = 4 * half;
      if constexpr (kSwizzled)
        store_two_swizzled(out, row, first + block, made.stored[0][half], made.stored[1][half]);
      if (kMasked && !kColumns && block < target.left)
        store_mask(p, out, row, first + block, made.trusted[half]);
    }
  }
}

// Q2_DEQUANTIZED: stores what a lane has rounded of a line, row `row` of the result.
template <bool kColumns>
Q2_INLINE void store_dequantized(const Output& out, Tile tile, const Rows& rows, int row,
                                 const Pair (&x)[2][16], const Results& made, const Common& common) {
  int lane_of_row = threadIdx.x % 2, block = (kColumns ? tile.row : tile.col) / kBlock;
  Staged staged(shared_tiles, out, common);
  u32 random_bits[2][2] = {};
  if constexpr (kRule == MS_EDEN) random_bits_of_line(staged, row, block, random_bits);
  u32 at = staged.place(threadIdx.x / 2 % kStagedRows, 64 * lane_of_row);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int group = i / 2, half = i % 2;
    staged.put(at, 8 * half + 2 * group, x[group], half, made.stored[group][half],
               random_bits[group][half]);
  }
  int first = threadIdx.x / 32 * kStagedRows;
  if constexpr (kColumns) staged.store_cols(tile.col + first, block);
  else staged.store_rows(rows, first, block);
}

// A line is a row or a column of a tile, in two lanes (lines.cuh). at: where the tile lies in shared_tiles.
template <bool kColumns>
Q2_INLINE void quantize_lines(const Params& p, const Output& out, const Masks& masks, Tile tile,
                              const Rows& rows, u32 at, Places places, const Common& common,
                              Extent& extent) {
  constexpr int kChunk = kColumns ? kSize : kRowSize;
  Pair x[2][16];
  if constexpr (kColumns) load_column(p, masks, tile, shared_tiles + at, places, x);
  else load_row(masks, shared_tiles, at, places, x);
  rotate_line<kChunk>(x);
  int row = kColumns ? tile.col + column_at(column_of_lane()) : row_of_result(out, rows, threadIdx.x / 2);
  int block = (u32)(kColumns ? tile.row : tile.col) / kBlock;
  u32 random = random_at(out, row, block + 2 * (threadIdx.x % 2));
  Results made;
  round_groups<kColumns>(x, common, out, random, made, extent, kColumns ? share_of(rows) : 1.0f);
  if constexpr (kRule == AMAX) return;
  if constexpr (kSwaps) exchange_members(x, made);
  if constexpr (kDequantized) store_dequantized<kColumns>(out, tile, rows, row, x, made, common);
  if constexpr (kCodes || kRawScales) store_line<kColumns>(p, out, row, block, made);
}

// Values that all blocks of one output share. EXACT: thread block 0 writes the global scale.
Q2_INLINE Common common_of(const Params& p, const Output& out, float norm) {
  Common common = {};
  common.factor = kScaled ? (p.source_global ? *p.source_global : 1.0f) * norm : norm;
  if constexpr (kRule == EXACT) {
    u32 largest = 0;
    for (int i = threadIdx.x; i < out.parts; i += kThreads) largest = max(largest, out.largest[i]);
    common.global_scale = exact_global_scale(block_largest<kThreads>(largest), common.factor);
    common.inverse_global_scale = __frcp_rn(common.global_scale);
    if (blockIdx.x == 0 && threadIdx.x == 0) *out.global_scale = common.global_scale;
  }
  return common;
}

extern "C" __global__ void __launch_bounds__(kThreads, Q2_BLOCKS_PER_SM)
    rotate_quantize(const __grid_constant__ Batch batch) {
  static_assert(kOperands == 1 || (kRule != EXACT && kRule != AMAX), "each has a global scale of its own");
  static_assert(!kBatch || (kRule != EXACT && kRule != AMAX), "`parts` counts those of AMAX");
  const Params& p = batch.of[kBatch ? blockIdx.y : 0];
  if (kBatch && blockIdx.x >= thread_blocks(p)) return;
  allow_next_kernel();  // which waits for the end of this one before it reads its results
  Extents extents, others;  // of the operand that is worked on, and of the other one
  int index = blockIdx.x;
  const u32 step = thread_blocks(p);
  const Walk walk(p);
  const Places places = places_in_tile();
  Tile tile = walk.first(), next;
  Share share;  // packed: the next tile on its way; plain elements travel straight to shared memory
  u32 iteration = 0;  // counts the tiles of this thread block
  if (kPacked) fetch_codes(p, tile, rows_of(p, tile), share);
  else fetch_elements(p, tile, rows_of(p, tile), shared_tiles, places);
  u32 scales = fetch_scales(p, tile, rows_of(p, tile));  // kRounded: of the next tile
  look_up(p, tile, 0);
  look_up(p, walk.after(tile), 1);
#pragma unroll 1
  for (int i = 0; kSigned && i < kOperands; ++i) make_masks(p.of[i], masks[i]);
  if (kRule == EXACT) await_previous_kernel();  // AMAX, which left its results in `largest`
  Common rows = {}, cols = {};
  if (kRows) rows = common_of(p, p.of[0].rowwise, Q2_ROTATES_ROWS ? p.norm : 1.0f);
  if (kCols) cols = common_of(p, p.of[0].columnwise, p.norm);
  make_factors(p);
  if (kScaled) __syncthreads();  // before the masks are read, and what was looked up
  // One barrier a tile: who has passed it has done with the tile before, whose place the next takes.
  for (int stage = 0; index < p.tiles; index += step, tile = next, ++iteration) {
    bool more = index + step < p.tiles;
    next = walk.after(tile);
    u32 at_stage = stage * kStageBytes;
    u8* current = shared_tiles + at_stage;
    if (kStages == 2) stage ^= 1;
    look_up(p, walk.after(next), iteration + 2);
    if (kPacked) expand_codes(share, current, places);
    if (more && kPacked) fetch_codes(p, next, rows_now(p, next, iteration + 1), share);
    if (!kPacked) await_copies();
    round_tile(scales, current, places);
    if (more) scales = fetch_scales(p, next, rows_now(p, next, iteration + 1));
    __syncthreads();
    if (more && !kPacked && kStages == 2)
      fetch_elements(p, next, rows_now(p, next, iteration + 1), shared_tiles + stage * kStageBytes,
                     places);
    const Rows held = rows_now(p, tile, iteration);
    // One body for both operands: twice as much code would not fit into the instruction cache.
#pragma unroll 1
    for (int i = 0; i < kOperands; ++i) {
      const Directions& of = p.of[i];
      const u32 at_tile = at_stage + i * kTileBytes;
      if (kRows)
        quantize_lines<false>(p, of.rowwise, masks[i], tile, held, at_tile, places, rows, extents.rowwise);
      if (kGrouped && held.tail) store_zeros_columnwise(of.columnwise, tile, cols);
      else if constexpr (kCols)
        quantize_lines<true>(p, of.columnwise, masks[i], tile, held, at_tile, places, cols,
                             extents.columnwise);
      if (kOperands == 2) exchange(extents, others);
    }
    if (kStages == 1) {
      __syncthreads();
      if (more && !kPacked)
        fetch_elements(p, next, rows_now(p, next, iteration + 1), shared_tiles, places);
    }
  }
  finish(p.of[0], extents);
  if (kOperands == 2) finish(p.of[kOperands - 1], others);
}
