// SPDX-License-Identifier: Apache-2.0
// The entry points, called through ctypes (kernels.py). No header of torch's or Python's: a C++17 compiler is enough.
#include "dequantize.h"

extern "C" {

void q2_quantize(const q2::Operand* o) { q2::quantize(*o); }
void q2_dequantize(const q2::Quantized* q) { q2::dequantize(*q); }
}
