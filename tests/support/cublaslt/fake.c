// SPDX-License-Identifier: Apache-2.0
// The part of libcublasLt that runtime_kernels/cuda/gemm/cublaslt.py calls, on memory of the CPU.
//
// It refuses what cuBLAS's manual forbids ("cublasLtMatmul", narrow precision data types; "1D block
// scaling for FP8 and FP4 data types"), and multiplies in double by a formula of its own for the places
// of scales. Wherever it refuses, fake_refusal() says why. Names and values are those of cublasLt.h;
// test_cublaslt_header.py compares them.

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  CUDA_R_32F = 0, CUDA_R_16F = 2, CUDA_R_16BF = 14, CUDA_R_8F_E4M3 = 28, CUDA_R_4F_E2M1 = 33,
  CUBLAS_COMPUTE_32F = 68, CUBLAS_OP_T = 1, CUBLASLT_POINTER_MODE_DEVICE = 1, CUBLASLT_EPILOGUE_BIAS = 4,
  CUBLASLT_MATMUL_DESC_POINTER_MODE = 2, CUBLASLT_MATMUL_DESC_TRANSA = 3, CUBLASLT_MATMUL_DESC_TRANSB = 4,
  CUBLASLT_MATMUL_DESC_EPILOGUE = 7, CUBLASLT_MATMUL_DESC_BIAS_POINTER = 8,
  CUBLASLT_MATMUL_DESC_A_SCALE_POINTER = 17, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER = 18,
  CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE = 26, CUBLASLT_MATMUL_DESC_A_SCALE_MODE = 31,
  CUBLASLT_MATMUL_DESC_B_SCALE_MODE = 32,
  CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F = 0, CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 = 1,
  CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES = 1, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5,
  CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES = 8,
  CUBLASLT_ALGO_CONFIG_STAGES_ID = 6, CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID = 8,
  CUBLAS_STATUS_SUCCESS = 0, CUBLAS_STATUS_INVALID_VALUE = 7, CUBLAS_STATUS_INTERNAL_ERROR = 14,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
};
enum { WORKSPACE = 4096, ATTRIBUTES = 40 };

typedef struct { int64_t value[ATTRIBUTES]; } Attributes;  // of an operation, or a preference
typedef struct { int type; uint64_t rows, columns; int64_t leading; } Layout;
typedef struct { uint64_t data[8]; } Algorithm;
typedef struct { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; } Result;

static char refusal[256];
static int capturing, look_ups;
static struct { uintptr_t first, end; } memory[64];
static int memories;

const char* fake_refusal(void) { return refusal; }
void fake_capture(int on) { capturing = on; }
int fake_is_capturing(void) { return capturing; }
int fake_look_ups(void) { return look_ups; }
// The caller has allocated these bytes. Other memory may not be touched.
void fake_allocated(const void* at, size_t bytes) {
  memory[memories % 64].first = (uintptr_t)at;
  memory[memories++ % 64].end = (uintptr_t)at + bytes;
}
void fake_forget(void) { memories = look_ups = 0, refusal[0] = 0; }

static int refuse(int status, const char* format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(refusal, sizeof refusal, format, values);
  va_end(values);
  return status;
}
#define REQUIRE(condition, ...) \
  do { if (!(condition)) return refuse(CUBLAS_STATUS_NOT_SUPPORTED, __VA_ARGS__); } while (0)
#define VALID(condition, ...) \
  do { if (!(condition)) return refuse(CUBLAS_STATUS_INVALID_VALUE, __VA_ARGS__); } while (0)

// Handles and descriptors ----------------------------------------------------------------------

size_t cublasLtGetVersion(void) { return 130300; }
int cublasLtCreate(void** handle) { return *handle = (void*)8, CUBLAS_STATUS_SUCCESS; }

static int create(void** made, size_t bytes) { return (*made = calloc(1, bytes)) ? 0 : 3; }
static int destroy(void* made) { return free(made), 0; }
int cublasLtMatmulDescCreate(void** made, int compute, int scale) {
  VALID(compute == CUBLAS_COMPUTE_32F && scale == CUDA_R_32F, "sums or alpha of another type than fp32");
  return create(made, sizeof(Attributes));
}
int cublasLtMatmulPreferenceCreate(void** made) { return create(made, sizeof(Attributes)); }
int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  int status = create(made, sizeof(Layout));
  if (!status) *(Layout*)*made = (Layout){type, rows, columns, leading};
  return status;
}
int cublasLtMatmulDescDestroy(void* of) { return destroy(of); }
int cublasLtMatmulPreferenceDestroy(void* of) { return destroy(of); }
int cublasLtMatrixLayoutDestroy(void* of) { return destroy(of); }

static int set(Attributes* of, int attribute, const void* value, size_t size, size_t wanted) {
  VALID(attribute >= 0 && attribute < ATTRIBUTES, "no attribute %d", attribute);
  VALID(size == wanted, "attribute %d has %zu bytes, not %zu", attribute, wanted, size);
  of->value[attribute] = size == 8 ? *(int64_t*)value : *(int32_t*)value;
  return 0;
}
int cublasLtMatmulDescSetAttribute(Attributes* of, int attribute, const void* value, size_t size) {
  int pointer = attribute == CUBLASLT_MATMUL_DESC_BIAS_POINTER ||
                attribute == CUBLASLT_MATMUL_DESC_A_SCALE_POINTER ||
                attribute == CUBLASLT_MATMUL_DESC_B_SCALE_POINTER;
  return set(of, attribute, value, size, pointer ? 8 : 4);
}
int cublasLtMatmulPreferenceSetAttribute(Attributes* of, int attribute, const void* value, size_t size) {
  return set(of, attribute, value, size, attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES ? 8 : 4);
}

// The manual's rules -----------------------------------------------------------------------------

static int bits_of(int type) {
  return type == CUDA_R_4F_E2M1 ? 4 : type == CUDA_R_8F_E4M3 ? 8 : type == CUDA_R_32F ? 32 : 16;
}

static int check_kind(const Attributes* of, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
  const int64_t* value = of->value;
  int fp4 = a->type == CUDA_R_4F_E2M1;
  int64_t mode = fp4 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3 : CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
  REQUIRE(a->type == b->type && (fp4 || a->type == CUDA_R_8F_E4M3), "A and B have types %d and %d", a->type, b->type);
  REQUIRE(value[CUBLASLT_MATMUL_DESC_TRANSA] == CUBLAS_OP_T && !value[CUBLASLT_MATMUL_DESC_TRANSB], "only TN");
  REQUIRE(value[CUBLASLT_MATMUL_DESC_A_SCALE_MODE] == mode && value[CUBLASLT_MATMUL_DESC_B_SCALE_MODE] == mode,
          "scale modes %ld and %ld of type %d", (long)value[CUBLASLT_MATMUL_DESC_A_SCALE_MODE],
          (long)value[CUBLASLT_MATMUL_DESC_B_SCALE_MODE], a->type);
  REQUIRE(value[CUBLASLT_MATMUL_DESC_POINTER_MODE] == CUBLASLT_POINTER_MODE_DEVICE, "alpha and beta on the host");
  VALID(a->rows == b->rows && a->columns == d->rows && b->columns == d->columns, "sizes that do not match");
  VALID(!memcmp(c, d, sizeof *c), "C and D differ");
  REQUIRE(a->rows % (128 / bits_of(a->type)) == 0, "K = %zu has rows that are no multiple of 16 bytes", (size_t)a->rows);
  const Layout* all[] = {a, b, d};
  for (int i = 0; i < 3; ++i) {
    VALID(all[i]->leading >= (int64_t)all[i]->rows, "a leading dimension below the rows");
    REQUIRE(all[i]->leading * bits_of(all[i]->type) % 128 == 0, "matrix %d: leading dimension %ld is no multiple of 16 bytes",
            i, (long)all[i]->leading);
  }
  REQUIRE(d->type == CUDA_R_32F || d->type == CUDA_R_16F || d->type == CUDA_R_16BF, "a result of type %d", d->type);
  REQUIRE(!value[CUBLASLT_MATMUL_DESC_EPILOGUE] || value[CUBLASLT_MATMUL_DESC_EPILOGUE] == CUBLASLT_EPILOGUE_BIAS,
          "another epilogue than a bias");
  int64_t bias = d->type == CUDA_R_32F ? CUDA_R_16BF : d->type;
  REQUIRE(!value[CUBLASLT_MATMUL_DESC_EPILOGUE] || value[CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE] == bias,
          "a bias of type %ld", (long)value[CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE]);
  return 0;
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, Attributes* of, Layout* a, Layout* b, Layout* c, Layout* d,
                                   Attributes* preference, int asked, Result* found, int* count) {
  *count = 0;
  ++look_ups;
  if (capturing) return refuse(CUBLAS_STATUS_INTERNAL_ERROR, "a look-up while a CUDA graph is captured");
  VALID(handle, "no handle");
  int status = check_kind(of, a, b, c, d);
  if (status) return status;
  for (int i = CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES; i <= CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES; ++i)
    REQUIRE(preference->value[i] >= 16, "no algorithm for matrices on %ld bytes", (long)preference->value[i]);
  for (; *count < 3 && *count < asked; ++*count) {
    size_t workspace = *count % 2 ? 0 : WORKSPACE;
    found[*count] = (Result){{{*count + 1}}, workspace, 0, 1.0f, {0}};
  }
  VALID(preference->value[CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES] >= WORKSPACE, "no room for a workspace");
  return 0;
}

int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* of, int attribute, void* value, size_t size, size_t* written) {
  VALID(attribute >= 0 && attribute <= CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, "no attribute %d", attribute);
  *written = attribute <= CUBLASLT_ALGO_CONFIG_STAGES_ID ? 4 : 2;
  VALID(size == *written, "attribute %d has %zu bytes, not %zu", attribute, *written, size);
  memset(value, 0, size);
  *(uint8_t*)value = (uint8_t)of->data[0];
  return 0;
}

static int check_memory(const char* what, const void* at, size_t bytes, size_t alignment) {
  VALID((uintptr_t)at % alignment == 0, "%s is not on %zu bytes", what, alignment);
  for (int i = 0; i < 64 && i < memories; ++i)
    if (memory[i].first <= (uintptr_t)at && (uintptr_t)at + bytes <= memory[i].end) return 0;
  return refuse(CUBLAS_STATUS_INVALID_VALUE, "%s: %zu bytes are not all in a tensor", what, bytes);
}

// The product ------------------------------------------------------------------------------------

static double half(uint16_t bits) {
  int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double size = exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24);
  return bits >> 15 ? -size : size;
}
static double e4m3(uint8_t bits) {
  if ((bits & 127) == 127) return NAN;
  int exponent = bits >> 3 & 15, fraction = bits & 7;
  double size = exponent ? ldexp(8 + fraction, exponent - 10) : ldexp(fraction, -9);
  return bits >> 7 ? -size : size;
}
static double bf16(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
}

// Element k of column `at`, without a scale. Two of E2M1 share a byte, the even one below.
static double element(const Layout* of, const uint8_t* data, size_t at, size_t k) {
  static const double sizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  size_t place = at * of->leading + k;
  if (of->type == CUDA_R_8F_E4M3) return e4m3(data[place]);
  int code = data[place / 2] >> 4 * (place % 2) & 15;
  return code & 8 ? -sizes[code & 7] : sizes[code];
}

static size_t up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

// Bytes of the scales of a matrix.
static size_t scale_bytes(const Layout* of) {
  return of->type == CUDA_R_4F_E2M1 ? up(of->columns, 128) * up(of->rows / 16, 4) : 4;
}

// Tiles of 128 columns and 4 scales along K, those along K first. In a tile 32 lines of 16 bytes: a
// line has 4 scales each of columns 32 apart.
static double scale(const Layout* of, const uint8_t* scales, size_t at, size_t k) {
  if (of->type != CUDA_R_4F_E2M1) return *(const float*)scales;
  size_t block = k / 16, tiles = up(of->rows / 16, 4) / 4;
  size_t tile = at / 128 * tiles + block / 4, line = at % 32, quarter = at % 128 / 32;
  return e4m3(scales[512 * tile + 16 * line + 4 * quarter + block % 4]);
}

// The nearest number of a type with `digits` significant bits and this smallest exponent, to even.
static double nearest(double x, int digits, int smallest) {
  int exponent;
  frexp(x, &exponent);
  int step = (exponent < smallest ? smallest : exponent) - digits;
  return ldexp(nearbyint(ldexp(x, -step)), step);
}
static void store(const Layout* of, void* data, size_t place, double x) {
  if (of->type == CUDA_R_32F) {
    ((float*)data)[place] = (float)x;
  } else if (of->type == CUDA_R_16BF) {
    float rounded = (float)nearest(x, 8, -125);
    memcpy((uint16_t*)data + place, (char*)&rounded + 2, 2);
  } else {
    double size = fabs(nearest(x, 11, -13));
    int exponent;
    frexp(size, &exponent);
    uint16_t bits = size < 0x1p-14 ? (uint16_t)ldexp(size, 24)
                    : size > 65504 ? 0x7C00
                                   : (uint16_t)((exponent + 14) * 1024 + (ldexp(size, 11 - exponent) - 1024));
    ((uint16_t*)data)[place] = isnan(x) ? 0x7FFF : (uint16_t)(bits | (signbit(x) ? 0x8000 : 0));
  }
}

int cublasLtMatmul(void* handle, Attributes* of, const float* alpha, const uint8_t* a_data, Layout* a,
                   const uint8_t* b_data, Layout* b, const float* beta, const void* c_data, Layout* c, void* d_data,
                   Layout* d, const Algorithm* algorithm, void* workspace, size_t bytes, void* stream) {
  const uint8_t* a_scales = (const uint8_t*)of->value[CUBLASLT_MATMUL_DESC_A_SCALE_POINTER];
  const uint8_t* b_scales = (const uint8_t*)of->value[CUBLASLT_MATMUL_DESC_B_SCALE_POINTER];
  const uint16_t* bias = (const uint16_t*)of->value[CUBLASLT_MATMUL_DESC_BIAS_POINTER];
  int biased = of->value[CUBLASLT_MATMUL_DESC_EPILOGUE] == CUBLASLT_EPILOGUE_BIAS, status;
  VALID(handle && stream, "no handle, or no stream");
  VALID(algorithm->data[0] >= 1 && algorithm->data[0] <= 3, "an algorithm that was not listed");
  size_t wanted = algorithm->data[0] % 2 ? WORKSPACE : 0;
  VALID(bytes >= wanted, "a workspace of %zu bytes", bytes);
  if ((status = check_kind(of, a, b, c, d)) ||
      (status = check_memory("A", a_data, a->columns * a->leading * bits_of(a->type) / 8, 16)) ||
      (status = check_memory("B", b_data, b->columns * b->leading * bits_of(b->type) / 8, 16)) ||
      (status = check_memory("D", d_data, d->columns * d->leading * bits_of(d->type) / 8, 16)) ||
      (status = check_memory("scales of A", a_scales, scale_bytes(a), a->type == CUDA_R_4F_E2M1 ? 16 : 4)) ||
      (status = check_memory("scales of B", b_scales, scale_bytes(b), b->type == CUDA_R_4F_E2M1 ? 16 : 4)) ||
      (status = check_memory("alpha", alpha, 4, 4)) || (status = check_memory("beta", beta, 4, 4)) ||
      (biased && (status = check_memory("bias", bias, 2 * d->rows, 16))) ||
      (wanted && (status = check_memory("workspace", workspace, wanted, 256))))
    return status;
  VALID(*beta == 0 && c_data == d_data, "C is added");
  for (size_t column = 0; column < d->columns; ++column)
    for (size_t row = 0; row < d->rows; ++row) {
      double sum = 0;
      for (size_t k = 0; k < a->rows; ++k)
        sum += element(a, a_data, row, k) * scale(a, a_scales, row, k) * element(b, b_data, column, k) *
               scale(b, b_scales, column, k);
      sum *= *alpha;
      if (biased) sum += d->type == CUDA_R_16F ? half(bias[row]) : bf16(bias[row]);
      store(d, d_data, column * d->leading + row, sum);
    }
  return 0;
}
