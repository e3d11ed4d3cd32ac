// SPDX-License-Identifier: Apache-2.0
// Copies a tile of the source into shared memory, for rotate_quantize.cu.
//
// Plain elements are copied unchanged. Quantized ones are dequantized: nvfp4 to f16 as code * scale *
// 2^-7 (6 significant bits, from 2^-17 to 21), mxfp4 to bf16 as code * scale; both exact. bf16 with
// scales of nvfp4 is copied, and then rounded to what its codes would be (round_to_scales.cuh).
#pragma once
#include "formats.cuh"

enum Source { BF16, F16, F32, NVFP4, MXFP4, NVFP4_SWIZZLED, MXFP4_SWIZZLED, ROUNDED, ROUNDED_SWIZZLED };

// Its scales, as for the fp4 GEMM.
constexpr bool kSourceSwizzled = Q2_SOURCE == NVFP4_SWIZZLED || Q2_SOURCE == MXFP4_SWIZZLED ||
                                 Q2_SOURCE == ROUNDED_SWIZZLED;
constexpr int kSource = Q2_SOURCE == ROUNDED_SWIZZLED ? ROUNDED
                        : kSourceSwizzled             ? Q2_SOURCE - 2
                                                      : Q2_SOURCE;
constexpr bool kRows = Q2_ROWS;
constexpr bool kCols = Q2_COLS;
constexpr int kSize = Q2_SIZE;  // elements of a rotated chunk: 1 (no rotation), 16, 32, 64 or 128
constexpr bool kSigned = Q2_SIGNED;    // D is drawn from a seed (2: the fixed one), else all ones
// Rows are rotated as columns are, or not at all.
constexpr int kRowSize = Q2_ROTATES_ROWS ? kSize : 1;
constexpr bool kRowSigned = Q2_ROTATES_ROWS && kSigned;
constexpr bool kGrouped = Q2_GROUPED;  // columnwise by groups of rows (groups.cuh)
constexpr bool kSums = Q2_SUMS;        // with dbias: sums of the columns of x
constexpr bool kVectors = Q2_VECTORS;  // rows of x start on 16 bytes
constexpr int kOperands = Q2_OPERANDS;  // two: computed from one read, and quantized alike
constexpr int kBatch = Q2_BATCH;  // matrices of a launch, each by thread blocks of its own; or 0
constexpr bool kPacked = kSource == NVFP4 || kSource == MXFP4;
constexpr bool kRounded = kSource == ROUNDED;
constexpr bool kScaled = kPacked || kRounded;  // a tile holds code * scale, with the signs of rows

constexpr int kThreads = Q2_THREADS;
constexpr int kTileRows = 128;
constexpr int kTileCols = kThreads / 2;  // 16 columns a warp
constexpr int kTileBlocks = kTileCols / 16;
static_assert(!kRows || kTileCols == 128, "rowwise a tile holds a chunk of 128");
constexpr int kBytes = kSource == F32 ? 4 : 2;  // an element in shared memory
constexpr int kRowBytes = kTileCols * kBytes;
constexpr int kTileBytes = kTileRows * kRowBytes;
constexpr int kStages = Q2_STAGES;  // tiles in shared memory: the next one's place, or none
constexpr int kStageBytes = kOperands * kTileBytes;  // one operand after the other
constexpr int kBlock = 16;
// Stores dequantized operands, for an emulated GEMM, instead of codes.
constexpr bool kDequantized = Q2_DEQUANTIZED;
constexpr bool kCodes = !kDequantized;
enum Rule { MS_EDEN, POW2, EXACT, MX, AMAX };  // rounding.cuh
constexpr Rule kRule = (Rule)Q2_RULE;
// How far apart the parts of two lanes of a line begin (lines.cuh). 64: they swap half of their elements.
// Not with MX, whose blocks of 32 would lie in pairs, nor with dbias, whose order goes by parts 32 apart,
// nor where it would spill registers.
constexpr bool kSpills = kDequantized && Q2_STOCHASTIC;
constexpr bool kSwaps = kSize == 128 && kRule != MX && !kSums && !kSpills;
constexpr int kApart = kSwaps ? 64 : 32;

// Signs are multiplied in: where all that comes of an infinity is NaN anyway.
constexpr bool kSignsMultiply =
    kSource == BF16 && kSigned && kDequantized && kRule == MS_EDEN && !kSums && !Q2_HW_FP4;

// Or as elements become fp32, by instructions of Blackwell.
constexpr bool kMixed = Q2_HW_FP4 && kSigned && (kSource == BF16 || kSource == F16);

// Columnwise: of two rows, which one word holds.
constexpr bool kSignPairs = kBytes == 2 && !kScaled && !kSignsMultiply;

#if Q2_PROLOGUE
#include "prologue.cuh"
#endif

// The destination of an operand's codes, and the inputs of its rounding (rounding.cuh).
struct Output {
  u8* codes;            // without codes: bf16
  void* scales;         // MS_EDEN, POW2: raw scales, fp32; EXACT: e4m3; MX: e8m0
  u32* largest;         // one a thread block, written; EXACT: `parts` of them, read. Without
                        // codes the smallest follow
  float* global_scale;  // EXACT
  const u64* sign_seed;  // Q2_SIGNED = 1
  const u64* seed;  // of the random bits
  int rows;         // of the result
  int blocks;       // of 16, a row
  u32 rng_offset;
  int parts;  // kBatch: thread blocks of this matrix
};

struct Directions {
  Output rowwise, columnwise;
};

struct Params {
  const void* x;     // elements, or codes; the scales of either:
  const u8* scales;  // e4m3 [ceil(M / 2^scale_shift), blocks of 16], or e8m0, blocks of 32; or
                     // both swizzled (formats.cuh, swizzled_at)
  const float* source_global;  // or null for 1
  Directions of[kOperands];
  long long pitch;    // elements (packed: bytes) from row to row of x
  int rows, cols;     // M, K
  int source_blocks;  // kScaled: scales a row of the source
  int scale_shift;    // 0 for blocks of one row, 4 for 16x16, 5 for 32x32
  int tiles, tiles_across;
  float norm;  // of the rotation; NVFP4: times 2^7
#if Q2_MASKED
  u32* mask;
#endif
#if Q2_SUMS
  float* sums;  // of the columns of each row of tiles [ceil(M / 128), columns of the tiles across]
#endif
#if Q2_GROUPED
  const int* ends;         // of the groups
  const int* padded_ends;  // in the padded layout
  int groups;
#endif
#if Q2_PROLOGUE
  PrologueInputs prologue;
#endif
};
// A batched launch: blockIdx.y is the matrix.
struct Batch {
  Params of[kBatch ? kBatch : 1];
};
static_assert(sizeof(Batch) == Q2_PARAMS_BYTES, "Params differs from its layout in plan.py");
static_assert(Q2_ROTATES_ROWS || (kRows && kCols && kSize > 1 && kSize < 128 && Q2_RULE != MS_EDEN),
              "written for rules without a norm behind the codes, and rows in no chunks of 128");
static_assert(!kSums || (kCols && !kScaled && !kGrouped), "sums are made while x is loaded columnwise");
static_assert(kOperands == 1 || (!kScaled && !kSums && !kGrouped && kStages == 1), "not written for two");

struct __align__(16) Masks {
  // Signs of element pairs (2 bytes each) or of elements: their bits, or as bf16 (kSignsMultiply) or as
  // what elements are (kMixed), 1 and -1.
  u32 rowwise[kRows ? (kBytes == 2 ? 64 : 128) : 4];
  // As rowwise, or with one sign in both halves (kScaled), or in the upper half (kSignsMultiply).
  u32 columnwise[kSignPairs ? 64 : 128];
#if Q2_SUMS
  // Columnwise: 1 or -1, which remove the signs of elements. kMixed needs none: it adds bare words.
  float signs[kMixed ? 4 : 128];
#endif
};
__shared__ Masks masks[kOperands];

// A word of elements in shared memory with its signs, and what it holds.
Q2_INLINE u32 with_mask(u32 word, u32 mask) {
  return kSignsMultiply ? mul_bf16x2(word, mask) : word ^ mask;
}
Q2_INLINE Pair two_of(u32 word) {
  if (kSignsMultiply) return signed_bf16x2(word, 0x3F800000u, 0x3F800000u);
  return kSource == BF16 || kSource == MXFP4 ? from_bf16x2(word) : from_f16x2(word);
}

// A word of elements, each with its sign.
Q2_INLINE Pair signed_two(u32 word, u32 mask) {
  if constexpr (kMixed && kSource == BF16) return times_signs_bf16x2(word, mask);
  if constexpr (kMixed) return times_signs_f16x2(word, mask);
  return two_of(with_mask(word, mask));
}

// signed_two along a row, which may have no signs.
Q2_INLINE Pair two_of_row(u32 word, u32 mask) {
  return kSigned && !kRowSigned ? two_of(word) : signed_two(word, mask);
}

// 16-byte piece `piece` of row `row` of a tile lies at row * kRowBytes + (slot(piece) ^
// twist(row)). That spreads over all banks what eight lanes take at once: 8 pieces of a row in loading, or
// every other one of two rows; rowwise one piece of four rows and the one kApart to its right; columnwise
// two rows, those kApart below, and the next piece of all (fp32: 4 pieces of rows kApart apart). Both are
// linear over exclusive or, so that of an address only its exclusive or with a constant changes in an
// unrolled loop.
constexpr Q2_INLINE u32 twist(int row) {
  int low = kBytes == 2 ? (row & 1) * 3 ^ (row >> 1 & 1) : row & 3;
  return 16 * (low | (row / kApart & 1) << 2);
}
constexpr Q2_INLINE u32 slot(int piece) {
  constexpr int kAway = kApart * kBytes / 16;
  return 16 * (kAway == 4 ? piece : piece ^ (piece / kAway & 1) << 2);
}

constexpr Q2_INLINE u32 place_in_tile(int row, int piece) {
  return row * kRowBytes + (slot(piece) ^ twist(row));
}

// Where a thread's part of a tile begins: of what it fetches, and of what it rounds. A shuffle gives
// them, since what it gave stays in a register instead of being recomputed for each tile.
struct Places {
  u32 fetched, rounded;
  Q2_INLINE u32 rowwise() const { return rounded & 0xFFFF; }
  Q2_INLINE u32 columnwise() const { return rounded >> 16; }
};

// The column of a tile, by place, that a lane shares with its neighbor. Lane l gets column l / 4 of a
// matrix of 8x8 (ptx.cuh, load_transposed): of four lanes the first two get it of one matrix, the
// others of the next.
Q2_INLINE int column_of_lane() {
  return threadIdx.x / 32 * 16 + threadIdx.x / 4 % 8 + threadIdx.x / 2 % 2 * 8;
}

// Where a lane's part of its line begins. That of the second lane comes first if they swap: it then
// gets the differences, which come second.
Q2_INLINE int part_of_lane() {
  return (threadIdx.x % 2 ^ kSwaps) * kApart;
}

// The column at a place. expand_codes makes columns 4 apart neighbors, unless an instruction expands codes.
constexpr Q2_INLINE int column_at(int place) {
  return kPacked && !Q2_HW_FP4 ? place / 8 * 8 + place % 8 / 2 + place % 2 * 4 : place;
}

// Where a lane's row of four matrices lies (ptx.cuh, load_transposed): rows of two lanes, of 8 columns and
// the next 8; eight rows of each.
Q2_INLINE u32 place_of_matrices() {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  return place_in_tile((lane / 2 % 2 ^ kSwaps) * kApart + lane / 8 * 2 + lane % 2, 2 * warp + lane / 4 % 2);
}

Q2_INLINE Places places_in_tile() {
  constexpr int kFetched = kPacked ? kTileBlocks : kRowBytes / 16;  // places of a row
  u32 fetched = place_in_tile(threadIdx.x / kFetched, threadIdx.x % kFetched * (kPacked ? 2 : 1));
  u32 rows = kRows ? place_in_tile(threadIdx.x / 2, part_of_lane() * kBytes / 16) : 0;
  int column = column_of_lane();
  u32 cols = kBytes == 2 ? place_of_matrices()
                         : place_in_tile(part_of_lane(), column / 4) + column % 4 * kBytes;
  constexpr bool kNoRegisters = (kDequantized && kRule == MX) ||
                                (kRule == EXACT && kRows && Q2_SWIZZLED && Q2_HW_FP4);
  if (kNoRegisters) return {fetched, rows | cols << 16};
  return {__shfl_xor_sync(~0u, fetched, 0), __shfl_xor_sync(~0u, rows | cols << 16, 0)};
}

// -------------------------------------------------------------------------------------------------
// Loading

struct Tile {
  int row, col;  // of its first element; kGrouped: row of the padded layout
};

// How many thread blocks share the tiles of a matrix.
Q2_INLINE u32 thread_blocks(const Output& out) {
  return kBatch ? out.parts : gridDim.x;
}
Q2_INLINE u32 thread_blocks(const Params& p) {
  return thread_blocks(kRows ? p.of[0].rowwise : p.of[0].columnwise);
}

// Tile blockIdx.x, then every thread_blocks(p)-th, from left to right and from top to bottom.
struct Walk {
  int row_step, col_step, width;
  Q2_INLINE Walk(const Params& p)
      : row_step(thread_blocks(p) / p.tiles_across * kTileRows),
        col_step(thread_blocks(p) % p.tiles_across * kTileCols),
        width(p.tiles_across * kTileCols) {}
  Q2_INLINE Tile first() const {
    int across = width / kTileCols;
    return {(int)blockIdx.x / across * kTileRows, (int)blockIdx.x % across * kTileCols};
  }
  Q2_INLINE Tile after(Tile tile) const {
    tile = {tile.row + row_step, tile.col + col_step};
    return tile.col < width ? tile : Tile{tile.row + kTileRows, tile.col - width};
  }
};

// The rows of x that a tile holds.
struct Rows {
  int first, count;  // of x; kGrouped: at most kTileRows
  int shift;  // row j of the tile holds x's row first + (j >> shift); 4: if j is a multiple of 16
  bool tail;  // they belong to no group
  Q2_INLINE bool has(int j) const { return (j >> shift) < count && (shift < 4 || j % 16 == 0); }
  Q2_INLINE int at(int j) const { return first + (j >> shift); }
};

// n elements of a piece of 16 bytes, and zeros after them.
Q2_INLINE void fetch_few(u8* to, const u8* source, int n) {
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    if constexpr (kBytes == 2) ((u16*)to)[i] = i < n ? ((const u16*)source)[i] : 0;
    else ((u32*)to)[i] = i < n ? ((const u32*)source)[i] : 0;
  }
}

#if Q2_PROLOGUE
static_assert(!kGrouped, "a prologue computes rows in order");
#include "fetch_prologue.cuh"
#else
// Starts copying a tile of plain elements; what lies outside the matrix becomes 0.
Q2_INLINE void fetch_elements(const Params& p, Tile tile, const Rows& rows, u8* shared,
                              Places places) {
  constexpr int kPieces = kRowBytes / 16, kPerPiece = 16 / kBytes, kRowStep = kThreads / kPieces;
  int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  u32 target = places.fetched;
  const u8* corner = (const u8*)p.x + (mul_wide(rows.first, p.pitch) + tile.col) * kBytes;
  const u8* source = corner + piece * 16 + mul_wide(row, p.pitch * kBytes);
  u64 step = mul_wide(kRowStep, p.pitch * kBytes);
  bool whole = rows.count >= kTileRows && tile.col + kTileCols <= p.cols;
  if (kVectors && whole) {
#pragma unroll
    for (int r = 0; r < kTileRows; r += kRowStep, source += step)
      copy_async(shared + (target ^ twist(r)) + r * kRowBytes, source);
  } else {
    int cols_left = min(max(p.cols - tile.col - piece * kPerPiece, 0), kPerPiece);
#pragma unroll 1
    for (int r = 0; r < kTileRows; r += kRowStep, source += step) {
      int n = rows.has(row + r) ? cols_left : 0;
      u8* to = shared + (places.fetched ^ twist(r)) + r * kRowBytes;
      const u8* from = kGrouped ? source + (rows.at(row + r) - rows.first - row - r) * p.pitch * kBytes
                                : source;
      if (kVectors && n == kPerPiece) copy_async(to, from);
      else fetch_few(to, from, n);
    }
  }
  commit_copies();
}
#endif

// A thread's share of a quantized tile: blocks threadIdx.x, threadIdx.x + kThreads, ..., which are
// kShareRows rows apart.
constexpr int kShare = kTileRows * kTileCols / kBlock / kThreads;
constexpr int kShareRows = kThreads / kTileBlocks;
static_assert(kShareRows % 16 == 0, "the next of a share is that many copies or scales further");
struct Share {
  uint2 codes[kShare];
  u32 scales[kShare];
};

Q2_INLINE void fetch_codes(const Params& p, Tile tile, const Rows& rows, Share& share) {
  int place = threadIdx.x / kTileBlocks, row = rows.at(place), step = kShareRows >> rows.shift,
      block = tile.col / kBlock + threadIdx.x % kTileBlocks,
      scale = kSource == MXFP4 ? block / 2 : block;
  // How many rows of x there are from `row` on, in steps of `step`.
  int left = scale < p.source_blocks && rows.has(place) ? rows.first + rows.count - row : 0;
#pragma unroll
  for (int s = 0; s < kShare; ++s) {
    int down = s * step;
    u32 at = row + down;
    bool inside = down < left;
    const u8* codes = (const u8*)p.x + block * 8 + mul_wide(at, p.pitch);
    const u8* of = kSourceSwizzled
                       ? p.scales + swizzled_at(at, scale, (p.source_blocks + 3) / 4)
                       : p.scales + scale + mul_wide(at >> p.scale_shift, p.source_blocks);
    share.codes[s] = inside ? *(const uint2*)codes : uint2{0, 0};
    share.scales[s] = inside ? *of : 0;
  }
}

// Eight codes of one scale, with the signs of their row: four words of two elements, neighbors or
// columns i and i + 4 (formats.cuh, e2m1x8_to_f16x2).
Q2_INLINE void expand_eight(u32 codes, u32 scale, u32 signs, u32 (&words)[4]) {
#if Q2_HW_FP4
  constexpr u32 kSmaller = 0x20002000u;  // 2^-7
  from_e2m1x8(codes, words);
#else
  constexpr u32 kSmaller = 0x58005800u;  // 2^7: the words are times 2^-14
  e2m1x8_to_f16x2(codes, words);
#endif
  if constexpr (kSource == NVFP4) {
    u32 factor = mul_f16x2(e4m3x2_to_f16x2(scale * 0x101u), kSmaller) ^ signs;
#pragma unroll
    for (u32& word : words) word = mul_f16x2(word, factor);
  } else {
    Pair factor = both(__uint_as_float(__float_as_uint(from_e8m0(scale)) ^ (signs & 0x80000000u)));
#pragma unroll
    for (u32& word : words) {
      Pair two = mul(from_f16x2(Q2_HW_FP4 ? word : mul_f16x2(word, 0x74007400u)), factor);  // 2^14
      word = to_bf16x2(two.a, two.b);
    }
  }
}

// Expands a thread's share into the tile.
Q2_INLINE void expand_codes(const Share& share, u8* shared, Places places) {
  const u32* signs = masks[0].columnwise + threadIdx.x / kTileBlocks;
#pragma unroll
  for (int s = 0; s < kShare; ++s) {
    u32 words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      expand_eight(half ? share.codes[s].y : share.codes[s].x, share.scales[s],
            kSigned ? signs[s * kShareRows] : 0, words);
      u8* to = shared + (places.fetched ^ twist(s * kShareRows) ^ slot(half));
      *(uint4*)(to + s * kShareRows * kRowBytes) = {words[0], words[1], words[2], words[3]};
    }
  }
}

// The 128 bits of one Philox block, set where a sign is negative.
Q2_INLINE uint4 sign_bits(u64 seed) {
  uint4 block[1];
  philox(seed, 0u, 0, SIGNS, block);
  return block[0];
}

// 1 where the sign at this place of a chunk is negative.
Q2_INLINE u32 negative(uint4 random, int place) {
  int bit = place & (kSize - 1);
  u32 word = bit < 64 ? (bit < 32 ? random.x : random.y) : (bit < 96 ? random.z : random.w);
  return word >> (bit & 31) & 1;
}

constexpr u32 kOnes = kSource == F16 ? 0x3C003C00u : 0x3F803F80u;  // two
constexpr u64 kFixedSignSeed = 0;  // numerics/transforms.py

// No tensor has the fixed seed: made in a CUDA graph's warm-up it would lie in the graph's memory.
Q2_INLINE u64 sign_seed_of(const Output& out) {
  return Q2_SIGNED == 2 ? kFixedSignSeed : *out.sign_seed;
}

// The signs of elements 2 i and 2 i + 1, as factors of the elements or as their sign bits.
Q2_INLINE u32 signs_of_pair(uint4 random, int i) {
  u32 signs = negative(random, 2 * i) << 15 | negative(random, 2 * i + 1) << 31;
  return kSignsMultiply || kMixed ? signs | kOnes : signs;
}

// The signs of one chunk, as masks for the words that hold its elements.
Q2_INLINE void make_masks(const Directions& of, Masks& masks) {
  int i = threadIdx.x;
  if (kRows && kRowSigned && i < (kBytes == 2 ? 64 : 128)) {
    uint4 random = sign_bits(sign_seed_of(of.rowwise));
    masks.rowwise[i] = kBytes == 2 ? signs_of_pair(random, i) : negative(random, i) << 31;
  }
  if (kCols && i < 128) {
    uint4 random = sign_bits(sign_seed_of(of.columnwise));
    if constexpr (kSignPairs) {
      if (i < 64) masks.columnwise[i] = signs_of_pair(random, i);
    } else {
      masks.columnwise[i] = kSignsMultiply
                                ? 0x3F800000u | negative(random, i) << 31
                                : negative(random, i) * (kBytes == 2 ? 0x80008000u : 0x80000000u);
    }
#if Q2_SUMS
    if constexpr (!kMixed) masks.signs[i] = negative(random, i) ? -1.0f : 1.0f;
#endif
  }
}
