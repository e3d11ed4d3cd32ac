// SPDX-License-Identifier: Apache-2.0
// Quantizers of schemes whose scales serve rowwise and columnwise: fp8 (numerics/fp8.py) and squares
// of MXFP4 (numerics/mxfp4.py); and the transpose of fp8 codes.
//
//   Q2_WHAT  LARGEST  the largest finite |x| of each thread block
//            CODES    e4m3 along rows, along columns, or both, from the largest of those (Q2_FOLLOWS: in
//                     a launch behind that one), or from an amax that is given
//            SQUARES  e2m1 along rows, with a scale for each 32x32
//   Q2_SOURCE         of x: 0 bf16, 1 f16, 2 fp32; E4M3: codes, which stay as they are
//   Q2_GROUPED        columns are those of the padded layout of groups of rows (numerics/groups.py), in
//                     which each group begins a tile. Mp counts its rows
//
//   x        [M, K], rows `pitch` elements apart
//   rows     e4m3 [M, Kp] or e2m1 [M, Kp/2], columns e4m3 [K, Mp]: zeros where x ends
//   scale    fp32, of rows and of columns;  scales  e8m0 [ceil(M/32), Kp/32]
//   largest  u32 [parts]: bits of an fp32
//   ends     i32 [groups], of the rows of x, and padded_ends of those of the padded layout
//
// A tile is 128 rows of 64 columns; of squares 32 rows of 256, a warp each. A thread has 4x8 elements of
// it, in loads of 16 bytes. It turns 4x4 codes in registers and leaves columns in shared memory, so that
// 8 neighboring threads read and write 128 bytes of a column. Piece i of 16 bytes of column c is at
// i ^ c / 8, so that neither writing nor reading has bank conflicts.
// Bytes per element: those of x read by each launch, and those of the codes written. The second launch
// may begin during the first, which has begun after all that wrote x has ended: it reads x before it
// waits.

#include "formats.cuh"

enum What { LARGEST, CODES, SQUARES };
enum Source { BF16, F16, F32, E4M3 };
constexpr What kWhat = (What)Q2_WHAT;
constexpr Source kSource = (Source)Q2_SOURCE;
constexpr bool kRows = Q2_ROWS, kColumns = Q2_COLS, kFollows = Q2_FOLLOWS, kGrouped = Q2_GROUPED;
constexpr int kThreads = 256, kSide = 32;
constexpr int kTileRows = kWhat == SQUARES ? kSide : 128, kTileColumns = kWhat == SQUARES ? 256 : 64;
constexpr int kBytes = kSource == E4M3 ? 1 : kSource == F32 ? 4 : 2;
constexpr u32 kInfinity = 0x7F800000u, kNaN = 0x7FC00000u;

struct Params {
  const u8* x;
  u8* rows;
  float* row_scale;
  u8* columns;
  float* column_scale;
  u8* scales;
  u32* largest;
  long long pitch;
  int height, width;                // M, K
  int padded_width, padded_height;  // Kp, Mp
  int across, tiles, parts;
  int vectors;  // rows of x begin on 16 bytes
#if Q2_GROUPED
  const int* ends;
  const int* padded_ends;
  int groups;
#endif
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in transposable.py");

// Eight elements of a row, zeros where it has ended.
struct Eight {
  u32 words[2 * kBytes];
};

Q2_INLINE Eight load(const Params& p, int row, int end, int column) {
  Eight made = {};
  if (row >= end) return made;
  const u8* from = p.x + (row * p.pitch + column) * kBytes;
  if (p.vectors && column + 8 <= p.width) {
    if constexpr (kSource == E4M3) {
      uint2 two = *(const uint2*)from;
      made.words[0] = two.x, made.words[1] = two.y;
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 2; ++i) {
        uint4 four = ((const uint4*)from)[i];
        made.words[4 * i] = four.x, made.words[4 * i + 1] = four.y;
        made.words[4 * i + 2] = four.z, made.words[4 * i + 3] = four.w;
      }
    }
    return made;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (column + i >= p.width) break;
    if constexpr (kBytes == 4) made.words[i] = ((const u32*)from)[i];
    else if constexpr (kBytes == 2) made.words[i / 2] |= (u32)((const u16*)from)[i] << i % 2 * 16;
    else made.words[i / 4] |= (u32)from[i] << i % 4 * 8;
  }
  return made;
}

Q2_INLINE float element(const Eight& eight, int i) {
  if constexpr (kSource == F32) return __uint_as_float(eight.words[i]);
  Pair two = kSource == F16 ? from_f16x2(eight.words[i / 2]) : from_bf16x2(eight.words[i / 2]);
  return i % 2 ? two.b : two.a;
}

Q2_INLINE u32 magnitude(float x) {
  return __float_as_uint(x) & 0x7FFFFFFFu;
}

Q2_INLINE float finite_or_nan(float x, float value) {
  return magnitude(x) < kInfinity ? value : __uint_as_float(kNaN);
}

// The rows of x in a tile: the first, and where they end. tail: they are of no group, so that columns have
// zeros for them.
struct Rows {
  int first, end;
  bool tail;
};

Q2_INLINE Rows rows_from(const Params& p, int row) {
#if Q2_GROUPED
  int group = 0;  // as many as end before the tile
  for (int end = p.groups; group < end;) {
    int middle = (group + end) / 2;
    if (p.padded_ends[middle] <= row) group = middle + 1;
    else end = middle;
  }
  bool tail = group == p.groups;
  int first = row + (group ? p.ends[group - 1] - p.padded_ends[group - 1] : 0);
  return {first, tail ? p.height : min(p.ends[group], p.height), tail};
#else
  return {row, p.height, false};
#endif
}

// Where a thread's elements begin in a tile.
struct Place {
  int row, column;
};

Q2_INLINE Place place() {
  int thread = threadIdx.x;
  if (kWhat == SQUARES) return {thread % 32 / 4 * 4, thread / 32 * kSide + thread % 4 * 8};
  return {4 * (thread / 32 * 4 + thread / 8 % 4), 8 * (thread % 8)};
}

// Loads a thread's 4x8 elements of a tile, and says where they begin in x, and which rows it has.
Q2_INLINE Rows load_four(const Params& p, int tile, Place& at, Eight (&loaded)[4]) {
  Rows rows = rows_from(p, tile / p.across * kTileRows);
  at = place();
  at.row += rows.first, at.column += tile % p.across * kTileColumns;
#pragma unroll
  for (int i = 0; i < 4; ++i) loaded[i] = load(p, at.row + i, rows.end, at.column);
  return rows;
}

Q2_INLINE void find_largest(const Params& p) {
  allow_next_kernel();
  u32 own = 0;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    Place at;
    Eight loaded[4];
    load_four(p, tile, at, loaded);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      u32 bits = magnitude(element(loaded[i / 8], i % 8));
      own = max(own, bits < kInfinity ? bits : 0);
    }
  }
  own = block_largest<kThreads>(own);
  if (threadIdx.x == 0) p.largest[blockIdx.x] = own;
}

// 1 / scale, the least 2^k with amax / 2^k <= 448 (numerics/fp8.py, pow2_of_amax).
Q2_INLINE float inverse_scale(const Params& p) {
  u32 largest = 0;
  if constexpr (kFollows) {
    await_previous_kernel();
    for (int i = threadIdx.x; i < p.parts; i += kThreads) largest = max(largest, p.largest[i]);
    largest = block_largest<kThreads>(largest);
  } else {
    largest = *p.largest & 0x7FFFFFFFu;
  }
  int bits = (int)((largest + 0x1FFFFFu) & kInfinity) - (8 << 23);
  float power = __uint_as_float((u32)max(bits, 1 << 23));
  float scale = finite_or_nan(__uint_as_float(largest), largest ? power : 1.0f);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if constexpr (kRows) *p.row_scale = scale;
    if constexpr (kColumns) *p.column_scale = scale;
  }
  return finite_or_nan(scale, __uint_as_float((254u << 23) - __float_as_uint(scale)));
}

Q2_INLINE uint2 e4m3_of(const Eight& eight, float inverse) {
  if constexpr (kSource == E4M3) return {eight.words[0], eight.words[1]};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float value = element(eight, i);
    x[i] = finite_or_nan(value, value * inverse);
  }
  return {to_e4m3x4(x[0], x[1], x[2], x[3]), to_e4m3x4(x[4], x[5], x[6], x[7])};
}

// Four rows of four codes to four columns.
Q2_INLINE void turn(u32 a, u32 b, u32 c, u32 d, u32* columns) {
  u32 low_ab = __byte_perm(a, b, 0x5140), low_cd = __byte_perm(c, d, 0x5140);
  u32 high_ab = __byte_perm(a, b, 0x7362), high_cd = __byte_perm(c, d, 0x7362);
  columns[0] = __byte_perm(low_ab, low_cd, 0x5410);
  columns[1] = __byte_perm(low_ab, low_cd, 0x7632);
  columns[2] = __byte_perm(high_ab, high_cd, 0x5410);
  columns[3] = __byte_perm(high_ab, high_cd, 0x7632);
}

Q2_INLINE void write_codes(const Params& p) {
  __shared__ __align__(16) u32 turned[kColumns ? kTileColumns * kTileRows / 4 : 1];
  Place at;
  Eight loaded[4];
  Rows rows = load_four(p, blockIdx.x, at, loaded);
  float inverse = 1.0f;
  if constexpr (kSource != E4M3) inverse = inverse_scale(p);
  uint2 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[i] = e4m3_of(loaded[i], inverse);
    if (kRows && at.row + i < rows.end && at.column < p.padded_width)
      *(uint2*)(p.rows + (long long)(at.row + i) * p.padded_width + at.column) = codes[i];
    if (rows.tail) codes[i] = {0, 0};
  }
  if constexpr (kColumns) {
    u32 columns[8];
    turn(codes[0].x, codes[1].x, codes[2].x, codes[3].x, columns);
    turn(codes[0].y, codes[1].y, codes[2].y, codes[3].y, columns + 4);
    Place own = place();
#pragma unroll
    for (int i = 0; i < 8; ++i)
      turned[(own.column + i) * 32 + (own.row / 4 ^ own.column / 8 * 4)] = columns[i];
    __syncthreads();
    int piece = threadIdx.x % 8, row = blockIdx.x / p.across * kTileRows + 16 * piece;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int column = i * 32 + threadIdx.x / 8, to = at.column - own.column + column;
      if (to < p.width && row < p.padded_height)
        *(uint4*)(p.columns + (long long)to * p.padded_height + row) =
            ((const uint4*)turned)[column * 8 + (piece ^ column / 8)];
    }
  }
}

// Eight numbers to e2m1: formats.py, round_e2m1 and encode_e2m1.
Q2_INLINE u32 e2m1_of(const Eight& eight, float inverse) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = element(eight, i) * inverse;
#if !Q2_HW_FP4
    float v = fminf(fabsf(x[i]), 6.0f);
    u32 binade = max(__float_as_uint(v) & kInfinity, 127u << 23);
    float magic = __uint_as_float(binade + (22 << 23) + 0x400000u);
    x[i] = copysignf((v + magic - magic) * 0x1p-6f, x[i]);
#endif
  }
#if Q2_HW_FP4
  return to_e2m1x8(x);
#else
  u32 even = to_e4m3x4(x[0], x[2], x[4], x[6]), odd = to_e4m3x4(x[1], x[3], x[5], x[7]);
  return (even >> 2 & 0x07070707u) | (even >> 4 & 0x08080808u) | (odd << 2 & 0x70707070u) |
         (odd & 0x80808080u);
#endif
}

// 2^ceil(log2(largest / 6)) of each square, NaN of one that is not finite.
Q2_INLINE void write_squares(const Params& p) {
  Place at;
  Eight loaded[4];
  load_four(p, blockIdx.x, at, loaded);
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) largest = max(largest, magnitude(element(loaded[i / 8], i % 8)));
  largest = __reduce_max_sync(~0u, largest);
  u32 byte = (u32)min(max((int)((largest + 0x3FFFFFu) >> 23) - 2, 0), 253);
  float inverse = __uint_as_float((254 - byte) << 23);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (at.row + i < p.height && at.column < p.padded_width)
      *(u32*)(p.rows + ((long long)(at.row + i) * p.padded_width + at.column) / 2) =
          e2m1_of(loaded[i], inverse);
  if (threadIdx.x % 32 == 0 && at.row < p.height && at.column < p.padded_width)
    p.scales[(long long)(at.row / kSide) * (p.padded_width / kSide) + at.column / kSide] =
        largest < kInfinity ? byte : 255;
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.row_scale = 1.0f;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    transposable(const __grid_constant__ Params p) {
  if constexpr (kWhat == LARGEST) find_largest(p);
  else if constexpr (kWhat == SQUARES) write_squares(p);
  else write_codes(p);
}
