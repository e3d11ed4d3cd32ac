"""Runs the Triton fp4 GEMM under Triton's interpreter, which must be chosen before Triton is
imported: a program of its own, for tests/runtime_kernels/cuda/test_triton_gemm.py.

    TRITON_INTERPRET=1 python tests/support/emulation/triton_gemm.py

The interpreter has no dot_scaled; there is one here, on what the kernel loaded.
"""

import itertools

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

import q2compile.runtime_kernels as runtime_kernels
from q2compile.runtime_kernels.cuda.gemm import triton_kernel as gemm
from q2compile.runtime_kernels.numerics.schemes import get_scheme

assert runtime_kernels  # importing it registers the ops
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRID = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])


def decoded(codes, scales, dim: int) -> torch.Tensor:
    """[rows, K] of packed codes, two along dim (1: [rows, K/2], 0: [K/2, rows]), and of e4m3 scales
    [rows, blocks]."""
    low, high = torch.from_numpy(codes & 15), torch.from_numpy(codes >> 4)
    values = GRID[torch.stack([low, high], dim + 1).flatten(dim, dim + 1).int()]
    values = values if dim == 1 else values.t()
    scale = torch.from_numpy(scales.copy()).view(torch.float8_e4m3fn).float()
    return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)


def dot_scaled(self, a, a_scale, a_type, b, b_scale, b_type, sums, *rest):
    left = decoded(a.handle.data, a_scale.handle.data, 1)
    right = decoded(b.handle.data, b_scale.handle.data, 0)
    data = sums.handle.data + (left @ right.t()).numpy()
    return tl.tensor(interpreter.TensorHandle(data, sums.handle.dtype), sums.type)


def with_numpy_2_4(patch_tensor):
    """Triton 3.6's interpreter makes an int of an array of shape [1], which numpy 2.4 refuses."""

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def check(m: int, n: int, k: int, b_scheme: str, biased: bool) -> None:
    a_scheme = "nvfp4_46_pow2"
    a = torch.ops.q2.quantize(torch.randn(m, k), None, None, a_scheme, 0)
    w = torch.randn(n, k)
    amax = w.abs().amax() if get_scheme(b_scheme).takes_amax else None
    b = torch.ops.q2.quantize(w, amax, None, b_scheme, 0)
    bias = torch.randn(n) if biased else None
    got = gemm.gemm_fp4(a, b, bias, get_scheme(a_scheme), get_scheme(b_scheme), torch.float32)
    want = torch.ops.q2.gemm(*a, *b, bias, a_scheme, b_scheme, torch.float32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def main() -> None:
    TritonSemantic.dot_scaled = dot_scaled
    interpreter._patch_lang_tensor = with_numpy_2_4(interpreter._patch_lang_tensor)
    torch.cuda.get_device_capability = lambda device: (10, 0)
    torch.manual_seed(0)
    shapes = [(128, 128, 128), (200, 136, 272), (1, 7, 16), (1200, 130, 48)]
    schemes = ["nvfp4_46_pow2", "nvfp4_16x16"]
    cases = list(itertools.product(shapes, schemes, [False, True]))
    for shape, scheme, biased in cases:
        check(*shape, scheme, biased)
    print(f"{len(cases)} products agree with the reference")


if __name__ == "__main__":
    main()
