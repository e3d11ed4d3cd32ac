// SPDX-License-Identifier: Apache-2.0
// The FP4 conversions of csrc/include/ptx.cuh without their instructions: by comparing with the middles
// of the grid. A tie goes to the even code; NaN becomes 6, as in the instruction.
Q2_INLINE u32 to_e2m1x8(const float (&x)[8]) {
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float a = fminf(fabsf(x[i]), 6.0f);
    u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) +
               (a > 5.0f);
    u32 sign = x[i] == x[i] ? __float_as_uint(x[i]) >> 28 & 8 : 0;
    codes |= (code | sign) << (4 * i);
  }
  return codes;
}
Q2_INLINE u32 e2m1_to_f16(u32 code) {
  u32 m = code & 7, sign = (code & 8) << 12;
  return sign | (m < 2 ? m * 0x3800u : (m + 28) << 9);
}
Q2_INLINE void from_e2m1x8(u32 codes, u32 (&words)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = e2m1_to_f16(codes >> (8 * i)) | e2m1_to_f16(codes >> (8 * i + 4)) << 16;
}
