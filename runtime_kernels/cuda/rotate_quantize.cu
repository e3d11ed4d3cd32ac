// Rotation and MS-EDEN of a matrix along its rows, along its columns, or both from one read: the
// first of two phases. Behind q2::rht_quantize, q2::rht_quantize_both and q2::requantize. Phase 2,
// align_scales.cu, splits what a code is worth into block scales and a global scale.
//
//   x           [M, K], row-major with a pitch: bf16, f16, fp32; or nvfp4 codes u8 [M, Kp/2] with
//               scales e4m3 [M, Kp/16] (requantize)
//   along rows  contraction K, Kp = K in whole chunks: codes u8 [M, Kp/2], worth fp32 [M, Kp/16]
//   along cols  contraction M, Mp = M in whole chunks: codes u8 [K, Mp/2], worth fp32 [K, Mp/16]
//   largest     u32, one a thread block: bits of the largest worth it made (NaN compares above all)
//
// Algorithm: for each chunk of Q2_SIZE along the contraction u = H (x * D), H of +-1 (the norm is
// left to phase 2), D from the seed; for each block of 16 of u, MS-EDEN (ms_eden.cuh). Byte k/2 of
// a row of codes holds element k, in its low nibble for even k.
//
// A thread block walks over tiles of 128x128 (128x64 along columns alone); the next tile is on its
// way into shared memory while this one is worked on. A thread holds 64 elements, always four whole
// blocks of 16: half a row of a tile, or a quarter of each of two columns. Bits 0-3 of an element's
// place in a chunk of 128 count within a block, so that butterflies of h = 1, 2, 4, 8 stay in
// registers. Along rows so do h = 16, 64, and h = 32 goes between two lanes; along columns so does
// h = 64, and h = 16, 32 go between four lanes. Blocks are worked on in pairs.
//
// Order of operations: runtime_kernels/transforms.py:hadamard. Rounding: nearest even. The bits are
// the reference's for |u| < 2^122 (above, 2^-6 / pseudo-scale is an fp32 subnormal on Hopper).
// Bytes an element, bf16 source: 2 read, .75 written for each direction; nvfp4: .5625 read.

#include "ms_eden.cuh"

enum Source { BF16, F16, F32, NVFP4 };

constexpr int kSource = Q2_SOURCE;
constexpr bool kRows = Q2_ROWS;
constexpr bool kCols = Q2_COLS;
constexpr int kSize = Q2_SIZE;  // elements of a rotated chunk: 1 (no rotation), 16, 32, 64 or 128
constexpr bool kSigned = Q2_SIGNED;    // D is drawn from the seed, else all ones
constexpr bool kVectors = Q2_VECTORS;  // rows of x start on 16 bytes

constexpr int kThreads = Q2_THREADS;
constexpr int kTileRows = 128;
constexpr int kTileCols = kThreads / 2;  // 16 columns a warp
constexpr int kTileBlocks = kTileCols / 16;
static_assert(!kRows || kTileCols == 128, "along rows a tile holds a chunk of 128");
constexpr int kBytes =
    kSource == F32 ? 4 : 2;  // an element in shared memory (NVFP4 is held as f16)
constexpr int kRowBytes = kTileCols * kBytes;
constexpr int kTileBytes = kTileRows * kRowBytes;
constexpr int kStages = kSource == BF16 || kSource == F16 ? 2 : 1;  // tiles in shared memory
constexpr int kBlock = 16;

struct Output {
  u8* codes;
  float* worth;
  u32* largest;
  const u64* sign_seed;
  int rows;    // of the result
  int blocks;  // of 16, a row
};

struct Params {
  const void* x;     // elements, or codes
  const u8* scales;  // NVFP4: e4m3 [ceil(M / 2^scale_shift), blocks]
  Output along_rows, along_cols;
  long long pitch;    // elements (NVFP4: bytes) from row to row of x
  int rows, cols;     // M, K
  int source_blocks;  // NVFP4: blocks a row of the source
  int scale_shift;    // NVFP4: 0 for blocks 1x16, 4 for 16x16
  int tiles, tiles_across;
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in rotation.py");

extern __shared__ __align__(128) u8 shared_tiles[];

struct __align__(16) Masks {
  u32 along_rows[kBytes == 2 ? 64 : 128];  // signs of element pairs (2 bytes each) or of elements
  u32 along_cols[128];
};
__shared__ Masks masks;

// 16-byte piece `piece` of row `row` of a tile lies at row * kRowBytes + (slot(piece) ^
// twist(row)). That spreads over all banks what eight lanes take at once: 8 pieces of a row in
// loading; along rows one piece of every other pair of blocks of four rows; along columns 2 (of
// fp32: 4) pieces of rows 16 apart. Both are linear over exclusive or, so that of an address only
// its exclusive or with a constant changes in an unrolled loop.
constexpr Q2_INLINE u32 twist(int row) {
  return 16 * (kBytes == 2 ? (row & 1) | ((row >> 1 ^ row >> 4) & 1) << 1 | (row >> 5 & 1) << 2
                           : (row & 3) | (row >> 4 & 1) << 2);
}
constexpr Q2_INLINE u32 slot(int piece) {
  return 16 * (kBytes == 2 ? piece : piece ^ (piece >> 3 & 1) << 2);
}

// -------------------------------------------------------------------------------------------------
// Loading

struct Tile {
  int row, col;  // of its first element
};

// Tile blockIdx.x, then every gridDim.x-th, from left to right and from top to bottom.
struct Walk {
  int row_step, col_step, width;
  Q2_INLINE Walk(const Params& p)
      : row_step(gridDim.x / p.tiles_across * kTileRows),
        col_step(gridDim.x % p.tiles_across * kTileCols),
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

// n elements of a piece of 16 bytes, and zeros after them.
Q2_INLINE void fetch_few(u8* to, const u8* source, int n) {
#pragma unroll
  for (int i = 0; i < 16 / kBytes; ++i) {
    if constexpr (kBytes == 2) ((u16*)to)[i] = i < n ? ((const u16*)source)[i] : 0;
    else ((u32*)to)[i] = i < n ? ((const u32*)source)[i] : 0;
  }
}

// Starts copying a tile of plain elements; what lies outside the matrix becomes 0.
Q2_INLINE void fetch_elements(const Params& p, Tile tile, u8* shared) {
  constexpr int kPieces = kRowBytes / 16, kPerPiece = 16 / kBytes, kRowStep = kThreads / kPieces;
  int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  u32 target = row * kRowBytes + (slot(piece) ^ twist(row));
  const u8* source =
      (const u8*)p.x + ((tile.row + row) * p.pitch + tile.col + piece * kPerPiece) * kBytes;
  long long step = kRowStep * p.pitch * kBytes;
  bool whole = tile.row + kTileRows <= p.rows && tile.col + kTileCols <= p.cols;
  if (kVectors && whole) {
#pragma unroll
    for (int r = 0; r < kTileRows; r += kRowStep, source += step)
      copy_async(shared + (target ^ twist(r)) + r * kRowBytes, source);
  } else {
    int cols_left = min(max(p.cols - tile.col - piece * kPerPiece, 0), kPerPiece);
#pragma unroll 1
    for (int r = 0; r < kTileRows; r += kRowStep, source += step) {
      int n = tile.row + row + r < p.rows ? cols_left : 0;
      u8* to = shared + (target ^ twist(r)) + r * kRowBytes;
      if (kVectors && n == kPerPiece) copy_async(to, source);
      else fetch_few(to, source, n);
    }
  }
  commit_copies();
}

// A thread's share of a quantised tile: blocks threadIdx.x, threadIdx.x + kThreads, ...
constexpr int kShare = kTileRows * kTileCols / kBlock / kThreads;
struct Share {
  uint2 codes[kShare];
  u32 scales[kShare];
};

Q2_INLINE void fetch_codes(const Params& p, Tile tile, Share& share) {
#pragma unroll
  for (int s = 0; s < kShare; ++s) {
    int row = tile.row + (s * kThreads + threadIdx.x) / kTileBlocks,
        block = tile.col / kBlock + threadIdx.x % kTileBlocks;
    bool inside = row < p.rows && block < p.source_blocks;
    share.codes[s] =
        inside ? *(const uint2*)((const u8*)p.x + row * p.pitch + block * 8) : uint2{0, 0};
    share.scales[s] =
        inside ? p.scales[(long long)(row >> p.scale_shift) * p.source_blocks + block] : 0;
  }
}

// Dequantises a thread's share into the tile as f16: code * scale * 2^-7 * sign, exact (6
// significant bits, from 2^-17 to 21). Eight columns become four words of two, columns i and i + 4
// (numbers.cuh, e2m1x8_to_f16x2).
Q2_INLINE void expand_codes(const Share& share, u8* shared) {
#pragma unroll
  for (int s = 0; s < kShare; ++s) {
    int row = (s * kThreads + threadIdx.x) / kTileBlocks, block = threadIdx.x % kTileBlocks;
    u32 target = row * kRowBytes + (slot(2 * block) ^ twist(row));
    u32 scale = mul_f16x2(e4m3x2_to_f16x2(share.scales[s] * 0x101u), 0x58005800u);  // 0x5800: 2^7
    if (kSigned) scale ^= masks.along_cols[row];
    u32 words[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      e2m1x8_to_f16x2(half ? share.codes[s].y : share.codes[s].x, words);
      *(uint4*)(shared + (target ^ slot(half))) = {
          mul_f16x2(words[0], scale), mul_f16x2(words[1], scale), mul_f16x2(words[2], scale),
          mul_f16x2(words[3], scale)};
    }
  }
}

// The 128 bits of one Philox block, set where a sign is negative.
Q2_INLINE uint4 sign_bits(u64 seed) {
  uint4 block[1];
  philox(seed, 0, 0, 0, SIGNS, block);
  return block[0];
}

// 1 where the sign at this place of a chunk is negative.
Q2_INLINE u32 negative(uint4 random, int place) {
  int bit = place & (kSize - 1);
  u32 word = bit < 64 ? (bit < 32 ? random.x : random.y) : (bit < 96 ? random.z : random.w);
  return word >> (bit & 31) & 1;
}

// The signs of one chunk, as masks for the words that hold its elements.
Q2_INLINE void make_masks(const Params& p) {
  int i = threadIdx.x;
  if (kRows && i < (kBytes == 2 ? 64 : 128)) {
    uint4 random = sign_bits(*p.along_rows.sign_seed);
    masks.along_rows[i] = kBytes == 2
                              ? negative(random, 2 * i) << 15 | negative(random, 2 * i + 1) << 31
                              : negative(random, i) << 31;
  }
  if (kCols && i < 128) {
    uint4 random = sign_bits(*p.along_cols.sign_seed);
    masks.along_cols[i] = negative(random, i) * (kBytes == 2 ? 0x80008000u : 0x80000000u);
  }
}

// -------------------------------------------------------------------------------------------------
// Rotation and quantisation of what a thread holds

// h = 1, 2, 4, 8, in registers.
Q2_INLINE void butterflies(Pair (&x)[16]) {
#pragma unroll
  for (int h = 1; h < 16 && h < kSize; h *= 2) {
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
    Pair other = {__shfl_xor_sync(~0u, x[i].a, mask), __shfl_xor_sync(~0u, x[i].b, mask)};
    x[i] = fma(x[i], sign, other);
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

// Where the results for one row of the output go, from block `block` on. The worths of a chunk of
// 128 lie in the order 0 4 1 5 2 6 3 7, so that what a lane has of them lies side by side, and
// lanes write whole 32-byte sectors: half-written ones cost L2 as much time as all the arithmetic
// here.
struct Target {
  u8* codes;
  float* worth;
  int left;  // blocks that exist from here on
};
constexpr bool kInterleaved = kSize == 128;

Q2_INLINE Target target_at(const Output& out, int row, int block) {
  long long at = (long long)row * out.blocks + block;
  return {out.codes + at * 8, out.worth + at, row < out.rows ? out.blocks - block : 0};
}

// One block, where chunks are shorter than 128.
Q2_INLINE void store(const Target& target, int ahead, const u32 (&codes)[2], float worth,
                     u32& largest) {
  if (ahead < target.left) {
    *(uint2*)(target.codes + ahead * 8) = {codes[0], codes[1]};
    target.worth[ahead] = worth;
    largest = max(largest, __float_as_uint(worth));
  }
}

Q2_INLINE u32 largest_of(Pair worth) {
  return max(__float_as_uint(worth.a), __float_as_uint(worth.b));
}

// Two lanes for each row of the tile, with four of its eight blocks each: group g, half h is block
// 2 * side + g + 4 h. Pairs: halves, elements 64 apart.
Q2_INLINE void quantize_along_rows(const Params& p, Tile tile, const u8* shared, u32& largest) {
  constexpr int kPieces = kBlock * kBytes / 16, kPerPiece = 16 / kBytes;
  int row = threadIdx.x / 2, side = threadIdx.x % 2;
  u32 source = row * kRowBytes + (slot(2 * side * kPieces) ^ twist(row));
  Pair x[2][16];
#pragma unroll
  for (int group = 0; group < 2; ++group) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      u32 words[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        int piece = (group + 4 * half) * kPieces + i;  // but for the side
        uint4 v = *(const uint4*)(shared + (source ^ slot(piece)));
        uint4 m = kSigned ? ((const uint4*)masks.along_rows)[2 * side * kPieces + piece]
                          : uint4{0, 0, 0, 0};
        words[half][0] = v.x ^ m.x, words[half][1] = v.y ^ m.y;
        words[half][2] = v.z ^ m.z, words[half][3] = v.w ^ m.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        Pair* to = x[group] + i * kPerPiece + j * kPerPiece / 4;
        if constexpr (kBytes == 2) {
          Pair a = kSource == BF16 ? from_bf16x2(words[0][j]) : from_f16x2(words[0][j]);
          Pair b = kSource == BF16 ? from_bf16x2(words[1][j]) : from_f16x2(words[1][j]);
          to[0] = {a.a, b.a};
          to[1] = {a.b, b.b};
        } else {
          to[0] = {__uint_as_float(words[0][j]), __uint_as_float(words[1][j])};
        }
      }
    }
    butterflies(x[group]);
  }
  if (kSize > 16) butterfly_between(x);
  u32 codes[2][2][2];  // group, half
  Pair worth[2];
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    if (kSize > 32) butterfly_across(x[group], 1);
    if (kSize > 64) {
#pragma unroll
      for (Pair& v : x[group]) v = {v.a + v.b, v.a - v.b};
    }
    worth[group] = ms_eden(x[group], codes[group]);
  }
  Target target = target_at(p.along_rows, tile.row + row, tile.col / kBlock);
  if constexpr (kInterleaved) {
    if (target.left <= 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *(uint4*)(target.codes + (2 * side + 4 * half) * 8) = {codes[0][half][0], codes[0][half][1],
                                                             codes[1][half][0], codes[1][half][1]};
    *(float4*)(target.worth + 4 * side) = {worth[0].a, worth[0].b, worth[1].a, worth[1].b};
    largest = max(largest, max(largest_of(worth[0]), largest_of(worth[1])));
  } else {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      store(target, 2 * side + group, codes[group][0], worth[group].a, largest);
      store(target, 2 * side + group + 4, codes[group][1], worth[group].b, largest);
    }
  }
}

// 16 columns for each warp, four lanes for each pair of columns. A lane has 16 rows from 16 *
// quarter and 16 rows 64 below: groups. Pairs: two columns.
Q2_INLINE void quantize_along_cols(const Params& p, Tile tile, const u8* shared, u32& largest) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = lane % 8, quarter = lane / 8;
  constexpr int kPieces = kBlock * kBytes / 16;  // 16-byte pieces of a warp's 16 columns
  int piece = warp * kPieces + pair / (8 / kPieces), within = pair % (8 / kPieces) * 2 * kBytes;
  u32 source = 16 * quarter * kRowBytes + (slot(piece) ^ twist(16 * quarter)) + within;
  Pair x[2][16];
#pragma unroll
  for (int group = 0; group < 2; ++group) {
    u32 signs[16];
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      uint4 m = kSigned && kSource != NVFP4
                    ? *(const uint4*)(masks.along_cols + 64 * group + 16 * quarter + i)
                    : uint4{0, 0, 0, 0};
      signs[i] = m.x, signs[i + 1] = m.y, signs[i + 2] = m.z, signs[i + 3] = m.w;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const u8* at = shared + (source ^ twist(i)) + (64 * group + i) * kRowBytes;
      if constexpr (kBytes == 2) {
        u32 word = *(const u32*)at ^ signs[i];
        x[group][i] = kSource == BF16 ? from_bf16x2(word) : from_f16x2(word);
      } else {
        uint2 two = *(const uint2*)at;
        x[group][i] = {__uint_as_float(two.x ^ signs[i]), __uint_as_float(two.y ^ signs[i])};
      }
    }
    butterflies(x[group]);
    if (kSize > 16) butterfly_across(x[group], 8);
    if (kSize > 32) butterfly_across(x[group], 16);
  }
  if (kSize > 64) butterfly_between(x);
  // The columns of a pair: neighbours, or 4 apart in expand_codes' order.
  int first = tile.col + 16 * warp + (kSource == NVFP4 ? pair / 4 * 8 + pair % 4 : 2 * pair);
  int second = first + (kSource == NVFP4 ? 4 : 1);
  u32 codes[2][2][2];  // group, column
  Pair worth[2];
#pragma unroll
  for (int group = 0; group < 2; ++group) worth[group] = ms_eden(x[group], codes[group]);
#pragma unroll
  for (int column = 0; column < 2; ++column) {
    Target target = target_at(p.along_cols, column ? second : first, tile.row / kBlock);
    float2 both_groups = column ? float2{worth[0].b, worth[1].b} : float2{worth[0].a, worth[1].a};
    if constexpr (kInterleaved) {
      if (target.left <= 0) continue;
#pragma unroll
      for (int group = 0; group < 2; ++group)
        *(uint2*)(target.codes + (quarter + 4 * group) * 8) = {codes[group][column][0],
                                                               codes[group][column][1]};
      *(float2*)(target.worth + 2 * quarter) = both_groups;
      largest = max(largest, largest_of(Pair{both_groups.x, both_groups.y}));
    } else {
      store(target, quarter, codes[0][column], both_groups.x, largest);
      store(target, quarter + 4, codes[1][column], both_groups.y, largest);
    }
  }
}

// The largest of the thread block's values, in thread 0.
Q2_INLINE u32 block_largest(u32 value) {
  __shared__ u32 of_warp[kThreads / 32];
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) value = max(value, of_warp[i]);
  __syncthreads();
  return value;
}

extern "C" __global__ void __launch_bounds__(kThreads, Q2_BLOCKS_PER_SM)
    rotate_quantize(const __grid_constant__ Params p) {
  allow_next_kernel();  // phase 2 waits for the end of this one before it reads its results
  u32 largest_along_rows = 0, largest_along_cols = 0;
  int index = blockIdx.x;
  const Walk walk(p);
  Tile tile = walk.first(), next;
  Share share;  // NVFP4: the next tile on its way; plain elements travel straight to shared memory
  if (kSource == NVFP4) fetch_codes(p, tile, share);
  else fetch_elements(p, tile, shared_tiles);
  if (kSigned) make_masks(p);
  if (kSource == NVFP4) __syncthreads();  // expand_codes reads the masks
  for (int stage = 0; index < p.tiles; index += gridDim.x, tile = next) {
    bool more = index + gridDim.x < p.tiles;
    next = walk.after(tile);
    u8* current = shared_tiles + stage * kTileBytes;
    if (kSource == NVFP4) {
      expand_codes(share, current);
      if (more) fetch_codes(p, next, share);
    } else if (kStages == 2) {
      stage ^= 1;
      if (more) fetch_elements(p, next, shared_tiles + stage * kTileBytes);
      if (more) await_copies<1>();
      else await_copies<0>();
    } else {
      await_copies<0>();
    }
    __syncthreads();
    if (kRows) quantize_along_rows(p, tile, current, largest_along_rows);
    if (kCols) quantize_along_cols(p, tile, current, largest_along_cols);
    __syncthreads();
    if (kSource == F32 && more) fetch_elements(p, next, shared_tiles);
  }
  if (kRows) {
    u32 largest = block_largest(largest_along_rows);
    if (threadIdx.x == 0) p.along_rows.largest[blockIdx.x] = largest;
  }
  if (kCols) {
    u32 largest = block_largest(largest_along_cols);
    if (threadIdx.x == 0) p.along_cols.largest[blockIdx.x] = largest;
  }
}
