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
//   Q2_GATE_AND_UP  besides: the two are the left and right half of one matrix, of whole tiles each
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
// Registers. A thread holds 64 elements, four whole blocks of 16: half a row of a tile, or a quarter of
// each of two columns. Blocks are worked on in pairs. Bits 0 to 3 of an element's index in a chunk of 128
// count within a block, so butterflies of h = 1, 2, 4, 8 stay in registers.
//   rowwise     h = 16 and 64 stay in registers, h = 32 goes between two lanes
//   columnwise  h = 64 stays in registers, h = 16 and 32 go between four lanes, unless tensor cores
//               rotate (tensor_cores.cuh)
//
// Order of operations: numerics/transforms.py:hadamard. Rounding: nearest even. The bits equal the
// reference's for |u| < 2^120; above that the factor of x is an fp32 subnormal on Hopper.
// Bytes per element, bf16 source: 2 read, .75 written rowwise and columnwise each (EXACT, MX: .56, .53;
// dequantized: 2.25, EXACT, MX: 2); nvfp4 source: .5625 read.

#include "extents.cuh"
#include "round_to_scales.cuh"
#include "stores.cuh"
#include "tail.cuh"
#include "tensor_cores.cuh"
#include "tile_sums.cuh"
#include "dequantized.cuh"

extern __shared__ __align__(16) u8 shared_tiles[];

// -------------------------------------------------------------------------------------------------
// Rotation and quantization of the elements of one thread

// h = 1, 2, 4, 8 of chunks of kChunk, in registers.
template <int kChunk> Q2_INLINE void butterflies(Pair (&x)[16]) {
#pragma unroll
  for (int h = 1; h < 16 && h < kChunk; h *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i & h) continue;
      Pair a = x[i], b = x[i + h];
      x[i] = add(a, b);
      x[i + h] = sub(a, b);
    }
  }
}

// One butterfly between lanes that differ in bit `mask`: a + b in the lower, a - b in the upper.
Q2_INLINE void butterfly_across(Pair (&x)[16], int mask) {
  Pair sign = both(threadIdx.x & mask ? -1.0f : 1.0f);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = fma(x[i], sign, from_lane(x[i], mask));
  }
}

// One butterfly between the two groups of blocks that a thread holds.
Q2_INLINE void butterfly_between(Pair (&x)[2][16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    Pair a = x[0][i], b = x[1][i];
    x[0][i] = add(a, b);
    x[1][i] = sub(a, b);
  }
}

Q2_INLINE Pair larger(Pair x, Pair y) {
  return {max_or_nan(x.a, y.a), max_or_nan(x.b, y.b)};
}

// The larger of two non-negative floats, as bits; NaN is ignored.
Q2_INLINE u32 larger_bits(u32 x, float y) {
  return __float_as_uint(fmaxf(__uint_as_float(x), y));
}

// first: index of the first Philox block of random bits, for each member of group 0; step: from there to
// group 1. kAcross: a block of 32 lies in two lanes, else in both groups of one. x becomes what the
// codes stand for, in kUnit.
template <bool kAcross>
Q2_INLINE void round_groups(Pair (&x)[2][16], const Common& common, const Output& out, u32 first_a,
                            u32 first_b, int step, Results& results, Extent& extent,
                            [[maybe_unused]] float share = 1.0f) {
  if constexpr (kRule == MS_EDEN) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      Pair raw_scale = ms_eden(x[group], results.codes[group]);
      if constexpr (kAcross && kSpread) raw_scale = mul(raw_scale, both(share));
      results.stored[group][0] = __float_as_uint(raw_scale.a);
      results.stored[group][1] = __float_as_uint(raw_scale.b);
    }
  } else {
    Pair most[2] = {largest_of_block(x[0]), largest_of_block(x[1])};
    if constexpr (kRule == MX && kAcross) {
#pragma unroll
      for (Pair& m : most) m = larger(m, from_lane(m, kQuartersApart));
    } else if constexpr (kRule == MX) {
      most[0] = most[1] = larger(most[0], most[1]);
    }
    if constexpr (kRule == AMAX) {
#pragma unroll
      for (Pair m : most) {
        m = fma(m, both(0.0f), m);  // Inf becomes NaN, too
        extent.largest = larger_bits(larger_bits(extent.largest, m.a), m.b);
      }
      return;
    }
    if constexpr (kMasked && !kAcross) {  // a mask is made rowwise alone
      uint2 stored = round_trusting(x, most[0], common, results.codes, results.trusted);
      results.stored[0][0] = stored.x, results.stored[0][1] = stored.y;
      return;
    }
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      u32 at[2] = {first_a + group * step, first_b + group * step};
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

// First Philox block of the elements of a block of 16, which takes two (plan.py refuses operands too
// large for 32 bits).
Q2_INLINE u32 random_at(const Output& out, int row, int block) {
  return 2 * ((u32)row * out.blocks + block);
}

// Stores the codes, scales and masks of quantize_rowwise.
Q2_INLINE void store_rowwise(const Params& p, const Output& out, Tile tile, const Rows& rows,
                                const Results& made) {
  int row = row_of_result(out, rows, threadIdx.x / 2), lane_of_row = threadIdx.x % 2;
  Target target = target_at(out, row, tile.col / kBlock);
  if constexpr (kInterleaved) {
    if (target.left <= 0) return;
#pragma unroll
    for (int half = 0; half < 2 && kCodes; ++half)
      *(uint4*)(target.codes + (2 * lane_of_row + 4 * half) * 8) = {
          made.codes[0][half][0], made.codes[0][half][1], made.codes[1][half][0],
          made.codes[1][half][1]};
    ((uint4*)target.scales)[lane_of_row] = {made.stored[0][0], made.stored[0][1], made.stored[1][0],
                                     made.stored[1][1]};
  } else {
    // Blocks of a row in fours, so that whole sectors are written.
    bool fours = out.blocks % 4 == 0;
    if constexpr (kRawScales) {
      if (fours) store_four_raw_scales(target, made);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int ahead = 2 * lane_of_row + 4 * half;
      if (fours) {
        store_two(target, ahead, made.codes[0][half], made.codes[1][half], made.stored[0][half],
                  made.stored[1][half]);
      } else {
        store(target, ahead, made.codes[0][half], made.stored[0][half]);
        store(target, ahead + 1, made.codes[1][half], made.stored[1][half]);
      }
      int block = tile.col / kBlock + ahead;
      if constexpr (kSwizzled)
        store_two_swizzled(out, row, block, made.stored[0][half], made.stored[1][half]);
      if (kMasked && ahead < target.left) store_mask(p, out, row, block, made.trusted[half]);
    }
  }
}

// Q2_DEQUANTIZED: stores what quantize_rowwise has rounded.
Q2_INLINE void store_dequantized_rowwise(const Params& p, const Output& out, Tile tile,
                                    const Rows& rows, const Pair (&x)[2][16], const Results& made,
                                    const Common& common) {
  int row = threadIdx.x / 2, lane_of_row = threadIdx.x % 2, block = tile.col / kBlock;
  Staged staged(shared_tiles, out, common);
  u32 random_bits[2][2] = {};
  if constexpr (kRule == MS_EDEN)
    random_bits_rowwise(staged, row_of_result(out, rows, row), block, random_bits);
  u32 at = staged.place(row % kStagedRows, 64 * lane_of_row);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int group = i / 2, half = i % 2;
    staged.put(at, 8 * half + 2 * group, x[group], half, made.stored[group][half],
               random_bits[group][half]);
  }
  staged.store_rows(rows, row / kStagedRows * kStagedRows, block);
}

// The same of quantize_columnwise.
Q2_INLINE void store_dequantized_columnwise(const Output& out, Tile tile, int first, int second,
                                    const Pair (&x)[2][16], const Results& made,
                                    const Common& common) {
  auto [pair, quarter] = lane_columnwise();
  int warp = threadIdx.x / 32, block = tile.row / kBlock;
  Staged staged(shared_tiles, out, common);
  u32 random_bits[2][2] = {};
  if constexpr (kRule == MS_EDEN) random_bits_columnwise(staged, first, second, block, random_bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int group = i / 2, column = i % 2;
    u32 at = staged.place(pair + 8 * column, 32 * quarter);
    staged.put(at, 8 * group, x[group], column, made.stored[group][column], random_bits[group][column]);
  }
  staged.store_cols(tile.col + kStagedRows * warp, block);
}

// Two lanes for each row of the tile, with four of its eight blocks each: group g, half h is block
// 2 * lane_of_row + g + 4 h. Pairs: halves, elements 64 apart.
Q2_INLINE void quantize_rowwise(const Params& p, const Output& out, const Masks& masks,
                                   Tile tile, const Rows& rows, const u8* shared,
                                   Places places, const Common& common, Extent& extent) {
  constexpr int kPieces = kBlock * kBytes / 16, kPerPiece = 16 / kBytes;
  int row = threadIdx.x / 2, lane_of_row = threadIdx.x % 2;
  u32 source = places.rowwise();
  Pair x[2][16];
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      u32 words[2][4], signs[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int piece = (group + 4 * half) * kPieces + i;  // without lane_of_row
        uint4 v = *(const uint4*)(shared + (source ^ slot(piece)));
        uint4 m = {0, 0, 0, 0};
        if (kRowSigned) m = ((const uint4*)masks.rowwise)[2 * lane_of_row * kPieces + piece];
        words[half][0] = v.x, words[half][1] = v.y, words[half][2] = v.z, words[half][3] = v.w;
        signs[half][0] = m.x, signs[half][1] = m.y, signs[half][2] = m.z, signs[half][3] = m.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Pair* to = x[group] + i * kPerPiece + j * kPerPiece / 4;
        if constexpr (kBytes == 2) {
          Pair a = two_of_row(words[0][j], signs[0][j]), b = two_of_row(words[1][j], signs[1][j]);
          to[0] = {a.a, b.a};
          to[1] = {a.b, b.b};
        } else {
          to[0] = {__uint_as_float(words[0][j] ^ signs[0][j]),
                   __uint_as_float(words[1][j] ^ signs[1][j])};
        }
      }
    }
    butterflies<kRowSize>(x[group]);
  }
  if (kRowSize > 16) butterfly_between(x);
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    if (kRowSize > 32) butterfly_across(x[group], 1);
    if (kRowSize > 64) {
#pragma unroll
      for (Pair& v : x[group]) v = sum_and_difference(v);
    }
  }
  u32 random = random_at(out, row_of_result(out, rows, row), tile.col / kBlock + 2 * lane_of_row);
  Results made;
  round_groups<false>(x, common, out, random, random + 8, 2, made, extent);
  if constexpr (kRule == AMAX) return;
  if constexpr (kDequantized) store_dequantized_rowwise(p, out, tile, rows, x, made, common);
  if constexpr (kCodes || kRawScales) store_rowwise(p, out, tile, rows, made);
}

// Loads the columnwise elements of one lane in one group, with their signs.
Q2_INLINE void load_cols(const Masks& masks, const u8* shared, Places places, int group, Pair (&x)[16]) {
  int first = 64 * group + 16 * lane_columnwise().quarter;
  u32 source = places.columnwise();
  constexpr int kSigns = kSignPairs ? 8 : 16;
  u32 signs[kSigns];
#pragma unroll
  for (int i = 0; i < kSigns; i += 4) {
    uint4 m = kSigned && !kScaled ? *(const uint4*)(masks.columnwise + first * kSigns / 16 + i)
                                  : uint4{0, 0, 0, 0};
    signs[i] = m.x, signs[i + 1] = m.y, signs[i + 2] = m.z, signs[i + 3] = m.w;
  }
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const u8* row = shared + (64 * group + i) * kRowBytes;
    if constexpr (kMatrices8 && !kTensorCores) {
      u32 words[4];  // of two rows: two columns, and of the next two rows
      load_transposed(row + (source ^ twist(64 * group + i)), words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        int at = i + j / 2 * 2;
        Pair two = kSignsMultiply ? signed_bf16x2(words[j], signs[at % kSigns], signs[(at + 1) % kSigns])
                                  : signed_two(words[j], signs[at / 2]);
        element(x, j % 2, at) = two.a, element(x, j % 2, at + 1) = two.b;
      }
    } else {
#pragma unroll
      for (int j = i; j < i + 4; ++j) {
        const u8* of = row + (j - i) * kRowBytes;
        if constexpr (kTensorCores) {
          u32 word = *(const u16*)(of + (source ^ twist(j))) |
                     *(const u16*)(of + (source ^ twist(j) ^ slot(1))) << 16;
          x[j] = two_of(word);
        } else {
          uint2 two = *(const uint2*)(of + (source ^ twist(j)));
          x[j] = {__uint_as_float(two.x ^ signs[j % kSigns]), __uint_as_float(two.y ^ signs[j % kSigns])};
        }
      }
    }
  }
}

// The columnwise elements of one lane, rotated in the reference's order.
Q2_INLINE void rotated_in_order(const Params& p, const Masks& masks, Tile tile, const u8* shared,
                                Places places, Pair (&x)[2][16]) {
  int quarter = lane_columnwise().quarter;
  [[maybe_unused]] Pair sum = both(0.0f);
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    load_cols(masks, shared, places, group, x[group]);
    if constexpr (kSums) add_to_sum(sum, x[group], 64 * group + 16 * quarter);
    // A sum of a chunk is -0 only where its first element is (numerics/quantize_tiles.py).
    if constexpr (kScaled && kSize > 1) x[group][0] = add(x[group][0], both(0.0f));
    butterflies<kSize>(x[group]);
    if (kSize > 16) butterfly_across(x[group], kQuartersApart);
    if (kSize > 32) butterfly_across(x[group], 2 * kQuartersApart);
  }
  if constexpr (kSums) store_sums(p, tile, sum);
  if (kSize > 64) butterfly_between(x);
}

// From two blocks element by element to the order of kNeighbors.
Q2_INLINE void pair_neighbors(Pair (&x)[16]) {
  Pair y[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) y[i] = x[i];
#pragma unroll
  for (int i = 0; i < 16; ++i) element(x, 0, i) = y[i].a, element(x, 1, i) = y[i].b;
}

// 16 columns for each warp, four lanes for each pair of columns. A lane has 16 rows from 16 *
// quarter and 16 rows 64 below: groups. Pairs: two columns.
Q2_INLINE void quantize_columnwise(const Params& p, const Output& out, const Masks& masks,
                                   Tile tile, const Rows& rows, const u8* shared, u32 iteration,
                                   Places places, const Common& common, Extent& extent) {
  auto [pair, quarter] = lane_columnwise();
  Pair x[2][16];
  // The vote tells the compiler that lanes agree: without it some variants spill registers.
  if constexpr (kTensorCores) rotated_by_products(shared, places.matrices(), x);
  if (!kTensorCores || !__all_sync(~0u, sums_are_exact(iteration))) {
    rotated_in_order(p, masks, tile, shared, places, x);
    if constexpr (kNeighbors) pair_neighbors(x[0]), pair_neighbors(x[1]);
  }
  int col = tile.col + threadIdx.x / 32 * 16;
  int first = col + column_at(place_of_column(pair, 0)),
      second = col + column_at(place_of_column(pair, 1));
  int block = tile.row / kBlock + quarter;
  Results made;
  round_groups<true>(x, common, out, random_at(out, first, block), random_at(out, second, block), 8,
                     made, extent, share_of(rows));
  if constexpr (kRule == AMAX) return;
  if constexpr (kDequantized) store_dequantized_columnwise(out, tile, first, second, x, made, common);
  if constexpr (kDequantized && !kRawScales) return;
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    Target target = target_at(out, column ? second : first, tile.row / kBlock);
    if constexpr (kInterleaved) {
      if (target.left <= 0) continue;
#pragma unroll
      for (int group = 0; group < 2 && kCodes; ++group)
        *(uint2*)(target.codes + (quarter + 4 * group) * 8) = {made.codes[group][column][0],
                                                               made.codes[group][column][1]};
      ((uint2*)target.scales)[quarter] = {made.stored[0][column], made.stored[1][column]};
    } else {
      store(target, quarter, made.codes[0][column], made.stored[0][column]);
      store(target, quarter + 4, made.codes[1][column], made.stored[1][column]);
    }
    if constexpr (kSwizzled) {
#pragma unroll
      for (int group = 0; group < 2; ++group)
        if (kRule == EXACT || quarter % 2 == 0)
          store_swizzled<u8>(out, column ? second : first, block + 4 * group,
                             made.stored[group][column]);
    }
  }
}

// Values that all blocks of one output share. EXACT: thread block 0 writes the global scale.
Q2_INLINE Common common_of(const Params& p, const Output& out, float norm) {
  Common common = {};
  common.factor = kScaled ? (p.source_global ? *p.source_global : 1.0f) * norm : norm;
  if constexpr (kRule == EXACT) {
    u32 largest = 0;
    for (int i = threadIdx.x; i < out.parts; i += kThreads) largest = max(largest, out.largest[i]);
    common.unit = exact_unit(block_largest<kThreads>(largest), common.factor);
    common.inverse_unit = __frcp_rn(common.unit);
    if (blockIdx.x == 0 && threadIdx.x == 0) *out.global_scale = common.unit;
  }
  return common;
}

extern "C" __global__ void __launch_bounds__(kThreads, Q2_BLOCKS_PER_SM)
    rotate_quantize(const __grid_constant__ Batch batch) {
  static_assert(kOperands == 1 || (kRule != EXACT && kRule != AMAX), "each has a unit of its own");
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
  for (int i = 0; kSigned && i < kMatrices; ++i) make_masks(p.of[i], masks[i]);
  if (kRule == EXACT) await_previous_kernel();  // AMAX, which left its results in `largest`
  Common rows = {}, cols = {};
  if (kRows) rows = common_of(p, p.of[0].rowwise, Q2_ROTATES_ROWS ? p.norm : 1.0f);
  if (kCols) cols = common_of(p, p.of[0].columnwise, p.norm);
  make_factors(p);
  if (kSharesSeed && threadIdx.x == 0) shared_seed = *p.of[0].columnwise.seed;
  if (kScaled) __syncthreads();  // before the masks are read, and what was looked up
  // One barrier a tile: who has passed it has done with the tile before, whose place the next takes.
  for (int stage = 0; index < p.tiles; index += step, tile = next, ++iteration) {
    bool more = index + step < p.tiles;
    next = walk.after(tile);
    u8* current = shared_tiles + stage * kStageBytes;
    if (kStages == 2) stage ^= 1;
    look_up(p, walk.after(next), iteration + 2);
    if (kPacked) expand_codes(share, current, places);
    if constexpr (kTensorCores && kPacked) note_scales(share, iteration);
    if constexpr (kTensorCores && kRounded) note_scales(scales, iteration);
    if (more && kPacked) fetch_codes(p, next, rows_now(p, next, iteration + 1), share);
    if (!kPacked) await_copies();
    round_tile(scales, current, places);
    if (more) scales = fetch_scales(p, next, rows_now(p, next, iteration + 1));
    __syncthreads();
    if (more && !kPacked && kStages == 2)
      fetch_elements(p, next, rows_now(p, next, iteration + 1), shared_tiles + stage * kStageBytes,
                     places);
#if Q2_PROLOGUE
    if (kPrefetched && index + 2 * step < p.tiles) {
      Tile later = walk.after(next);
      prefetch_elements(p, later, rows_now(p, later, iteration + 2));
    }
#endif
    const Rows held = rows_now(p, tile, iteration);
    // One body for both operands: twice as much code would not fit into the instruction cache.
#pragma unroll 1
    for (int i = 0; i < kOperands; ++i) {
      const int matrix = kGateAndUp ? 0 : i;
      const Directions& of = p.of[matrix];
      const Tile at = kGateAndUp ? Tile{tile.row, tile.col + i * p.cols} : tile;
      const u8* x = current + i * kTileBytes;
      if (kRows)
        quantize_rowwise(p, of.rowwise, masks[matrix], at, held, x, places, rows,
                            extents.rowwise);
      if (kGrouped && held.tail) store_zeros_columnwise(of.columnwise, at, cols);
      else if (kCols)
        quantize_columnwise(p, of.columnwise, masks[matrix], at, held, x, iteration, places, cols,
                            extents.columnwise);
      if (kMatrices == 2) exchange(extents, others);
    }
    if (kStages == 1) {
      __syncthreads();
      if (more && !kPacked)
        fetch_elements(p, next, rows_now(p, next, iteration + 1), shared_tiles, places);
    }
  }
  finish(p.of[0], extents);
  if (kMatrices == 2) finish(p.of[kMatrices - 1], others);
}
