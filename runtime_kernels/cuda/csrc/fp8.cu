// SPDX-License-Identifier: Apache-2.0
// The quantizer of scheme fp8 (numerics/fp8.py), and the transpose of its codes:
//
//   Q2_LARGEST 1   the largest finite |x| of each thread block
//   Q2_LARGEST 0   the largest of those, the scale, and the codes along rows, along columns, or both
//   Q2_SOURCE      of x: 0 bf16, 1 f16, 2 fp32; CODES: codes, which stay as they are
//
//   x        [M, K], rows `pitch` elements apart
//   rows     e4m3 [M, Kp], columns e4m3 [K, Mp]: padded with zeros to whole units of 16
//   scale    fp32, of each of the two
//   largest  u32 [parts]: bits of an fp32; an amax that is given, or what the first launch has left
//
// A tile is 128 rows of 64 columns. A thread has 4x8 elements of it, in loads of 16 bytes. It turns
// squares of 4x4 codes in registers and leaves columns in shared memory, so that 8 neighboring
// threads read and write 128 bytes of a column. Words of 4 codes lie where neither writing nor
// reading them has bank conflicts: piece i of 16 bytes of column c at i ^ c / 8.
// Bytes per element: those of x read by each launch, and 1 written along rows, 1 along columns. The
// second launch may begin during the first, which has begun after all that wrote x has ended: it
// reads x before it waits.

#include "formats.cuh"

enum Source { BF16, F16, F32, CODES };
constexpr Source kSource = (Source)Q2_SOURCE;
constexpr bool kLargest = Q2_LARGEST, kRows = Q2_ROWS, kColumns = Q2_COLS;
constexpr bool kFollows = Q2_FOLLOWS;  // a launch that looked for the largest
constexpr int kThreads = 256, kTileRows = 128, kTileColumns = 64;
constexpr int kBytes = kSource == CODES ? 1 : kSource == F32 ? 4 : 2;
constexpr u32 kExponent = 0x7F800000u;

struct Params {
  const u8* x;
  u8* rows;
  float* row_scale;
  u8* columns;
  float* column_scale;
  u32* largest;
  long long pitch;
  int height, width;                // M, K
  int padded_width, padded_height;  // Kp, Mp
  int across, tiles, parts;
  int vectors;  // rows of x begin on 16 bytes (CODES: 8)
};
static_assert(sizeof(Params) == Q2_PARAMS_BYTES, "Params differs from its layout in fp8.py");

// Eight elements of a row, zeros where it has ended: 2 words of codes, 4 of 16-bit floats, 8 of fp32.
struct Eight {
  u32 words[2 * kBytes];
};

Q2_INLINE Eight load(const Params& p, int row, int column) {
  Eight made = {};
  if (row >= p.height) return made;
  const u8* from = p.x + (row * p.pitch + column) * kBytes;
  if (p.vectors && column + 8 <= p.width) {
    if constexpr (kSource == CODES) {
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
  return magnitude(x) < kExponent ? value : __uint_as_float(0x7FC00000u);
}

Q2_INLINE uint2 codes_of(const Eight& eight, float inverse) {
  if constexpr (kSource == CODES) return {eight.words[0], eight.words[1]};
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float value = element(eight, i);
    x[i] = finite_or_nan(value, value * inverse);
  }
  return {to_e4m3x4(x[0], x[1], x[2], x[3]), to_e4m3x4(x[4], x[5], x[6], x[7])};
}

// numerics/fp8.py, pow2_of_amax: the least 2^k with amax / 2^k <= 448.
Q2_INLINE float pow2_of_amax(u32 amax) {
  int bits = (int)((amax + 0x1FFFFFu) & kExponent) - (8 << 23);
  float power = __uint_as_float((u32)max(bits, 1 << 23));
  return finite_or_nan(__uint_as_float(amax), amax ? power : 1.0f);
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

struct Place {
  int row, column;  // the first of four rows, and of eight columns, in the tile
};

Q2_INLINE Place place() {
  int thread = threadIdx.x;
  return {4 * (thread / 32 * 4 + thread / 8 % 4), 8 * (thread % 8)};
}

Q2_INLINE void find_largest(const Params& p) {
  allow_next_kernel();
  Place at = place();
  u32 own = 0;
  for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    int row = tile / p.across * kTileRows + at.row;
    int column = tile % p.across * kTileColumns + at.column;
    Eight loaded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) loaded[i] = load(p, row + i, column);
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      u32 bits = magnitude(element(loaded[i / 8], i % 8));
      own = max(own, bits < kExponent ? bits : 0);
    }
  }
  own = block_largest<kThreads>(own);
  if (threadIdx.x == 0) p.largest[blockIdx.x] = own;
}

Q2_INLINE float scale_of(const Params& p) {
  u32 largest = 0;
  if constexpr (kFollows) {
    await_previous_kernel();
    for (int i = threadIdx.x; i < p.parts; i += kThreads) largest = max(largest, p.largest[i]);
    largest = block_largest<kThreads>(largest);
  } else {
    largest = *p.largest & 0x7FFFFFFFu;
  }
  float scale = pow2_of_amax(largest);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    if constexpr (kRows) *p.row_scale = scale;
    if constexpr (kColumns) *p.column_scale = scale;
  }
  return finite_or_nan(scale, __uint_as_float((254u << 23) - __float_as_uint(scale)));
}

Q2_INLINE void write_codes(const Params& p) {
  __shared__ __align__(16) u32 turned[kColumns ? kTileColumns * kTileRows / 4 : 1];
  Place at = place();
  int top = blockIdx.x / p.across * kTileRows, left = blockIdx.x % p.across * kTileColumns;
  Eight loaded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) loaded[i] = load(p, top + at.row + i, left + at.column);
  float inverse = 1.0f;
  if constexpr (kSource != CODES) inverse = scale_of(p);
  uint2 codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[i] = codes_of(loaded[i], inverse);
    int row = top + at.row + i, column = left + at.column;
    if (kRows && row < p.height && column < p.padded_width)
      *(uint2*)(p.rows + (long long)row * p.padded_width + column) = codes[i];
  }
  if constexpr (kColumns) {
    u32 columns[8];
    turn(codes[0].x, codes[1].x, codes[2].x, codes[3].x, columns);
    turn(codes[0].y, codes[1].y, codes[2].y, codes[3].y, columns + 4);
    int word = at.row / 4;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      turned[(at.column + i) * 32 + (word ^ at.column / 8 * 4)] = columns[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int column = i * 32 + threadIdx.x / 8, piece = threadIdx.x % 8;
      if (left + column < p.width && top + 16 * piece < p.padded_height)
        *(uint4*)(p.columns + (long long)(left + column) * p.padded_height + top + 16 * piece) =
            ((const uint4*)turned)[column * 8 + (piece ^ column / 8)];
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) fp8(const __grid_constant__ Params p) {
  if constexpr (kLargest) find_largest(p);
  else write_codes(p);
}
