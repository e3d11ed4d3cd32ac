"""One small tile through each CUDA kernel, compared with the torch reference on the CPU.

Quantising kernels must give the reference's bits; GEMMs its numbers, to the rounding of bf16. Used
by `q2compile doctor`, and before the first use of a kernel on GPUs that this project could not be
tested on: a kernel that disagrees is refused there.
"""

import functools
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from q2compile.runtime_kernels.cuda.launch import unsupported
from q2compile.runtime_kernels.registry import REFERENCE, select

FAILED = "it failed its self-check on this GPU"
# Where the kernels have been run, not only compiled.
PROVEN = {(9, 0)}
_SHAPE = (200, 264)  # no multiple of 16 or 128, several tiles
_EDEN = "nvfp4_ms_eden_pow2"
_FORWARD = "nvfp4_46_pow2"
# bf16 rounds with a relative error of at most 2^-9; the order of the fp32 sums matters far less.
_GEMM_ERROR = 2.0**-8


def refusal(op: str, name: str, index: int) -> str | None:
    """None when the kernel may be used on this CUDA device, otherwise the reason in words."""
    reason = unsupported(index)
    if reason is not None:
        return reason
    if torch.cuda.get_device_capability(index) in PROVEN or (op, name, index) in _RUNNING:
        return None
    return _refusal(op, name, index)


_RUNNING: set[tuple[str, str, int]] = set()  # checks under way, which must not ask for themselves


@functools.cache
def _refusal(op: str, name: str, index: int) -> str | None:
    _RUNNING.add((op, name, index))
    try:
        difference = disagreement(op, name, torch.device("cuda", index))
    finally:
        _RUNNING.discard((op, name, index))
    return None if difference is None else f"{FAILED}: {difference}"


def disagreement(op: str, name: str, device: torch.device) -> str | None:
    """Runs kernel `name` of an op on a small input: None when it agrees with the reference,
    otherwise how it differs.

    Raises:
        ValueError: the kernel does not serve this device.
    """
    with unset_fake_temporarily(), torch.no_grad():
        arguments = CHECKED[op]()
        on_device = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        got = select(op, on_device, name)(*on_device)
        want = select(op, arguments, REFERENCE)(*arguments)
        if op == "gemm":
            error = (got.cpu().float() - want.float()).norm() / want.float().norm()
            return None if error <= _GEMM_ERROR else f"relative error {error:.1e}"
        # dequantize returns one tensor, the quantisers three or six
        names = ("numbers",) if op == "dequantize" else ("codes", "scales", "global scale") * 2
        for which, a, b in zip(names, _tuple(got), _tuple(want), strict=False):
            wrong = (a.cpu().float() != b.float()).sum().item()
            if wrong:
                return f"{wrong} of {b.numel()} {which} differ from the reference"
    return None


def _tuple(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _matrix() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(_SHAPE, generator=generator).to(torch.bfloat16)


def _quantized() -> tuple[torch.Tensor, ...]:
    return torch.ops.q2.quantize(_matrix(), None, None, _FORWARD, 0)


_SEED = torch.tensor(0x123456789ABCDEF)
CHECKED: dict[str, Callable[[], tuple]] = {
    "rht_quantize": lambda: (_matrix(), _SEED, _EDEN, "rht128", True, 1),
    "rht_quantize_both": lambda: (_matrix(), _SEED, _SEED + 1, _EDEN, "rht128", 0),
    "requantize": lambda: (*_quantized(), _SEED, _FORWARD, _EDEN, "rht128", _SHAPE[1], 1),
    "dequantize": lambda: (*_quantized(), _FORWARD, _SHAPE[1], torch.bfloat16),
    "gemm": lambda: (*_quantized(), *_quantized(), None, _FORWARD, _FORWARD, torch.bfloat16),
}
