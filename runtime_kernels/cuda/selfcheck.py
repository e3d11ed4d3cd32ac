"""One small tile through each CUDA kernel, compared with the torch reference on the CPU.

Quantising kernels must give the reference's bits; GEMMs its numbers, to the rounding of bf16. Used
by `q2compile doctor`, and before the first use of a kernel on GPUs that this project could not be
tested on: a kernel that disagrees is refused there.
"""

import functools
from collections.abc import Callable

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from q2compile.runtime_kernels.cuda.jit.launch import unsupported
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, WIDENED, get_scheme
from q2compile.runtime_kernels.registry import (
    FAILED,
    REFERENCE,
    failure_text,
    kernels_own,
    select,
    warn_of_failure,
)

# Where the kernels have been run, not only compiled.
PROVEN = {(9, 0)}
_SHAPE = (200, 264)  # no multiple of 16 or 128, several tiles
# bf16 rounds with a relative error of at most 2^-9; the order of the fp32 sums matters far less.
_GEMM_ERROR = 2.0**-8
_GEMMS = ("gemm", "grouped_gemm", "grouped_mm")


def refusal(op: str, name: str, index: int, scheme: str) -> str | None:
    """None when the kernel may be used with a scheme on this CUDA device, otherwise the reason in
    words."""
    if _proven(index):
        return None
    reason = unsupported(index)
    if reason is not None:
        return reason
    if op in ("dequantize", *_GEMMS):  # where the format is all that counts
        scheme = _OF_FORMAT[get_scheme(scheme).format]
    check = (op, name, index, scheme)
    return None if check in _RUNNING else _refusal(*check)


@functools.cache
def _proven(index: int) -> bool:
    return unsupported(index) is None and torch.cuda.get_device_capability(index) in PROVEN


_RUNNING: set[tuple[str, str, int, str]] = set()  # checks under way, which must not ask themselves


@functools.cache
def _refusal(op: str, name: str, index: int, scheme: str) -> str | None:
    device = torch.device("cuda", index)
    _RUNNING.add((op, name, index, scheme))
    try:
        reason = disagreement(op, name, device, scheme)
        reason = reason and f"{FAILED} its self-check on this GPU: {reason}"
    except Exception as error:
        if not kernels_own(error, device):
            raise
        reason = failure_text(error)
    finally:
        _RUNNING.discard((op, name, index, scheme))
    if reason is not None:
        warn_of_failure(op, name, device, reason)
    return reason


def disagreement(op: str, name: str, device: torch.device, scheme: str) -> str | None:
    """Runs kernel `name` of an op on a small input of a scheme: None when it agrees with the
    reference, otherwise how it differs.

    Raises:
        ValueError: the kernel does not serve this device or scheme.
    """
    with unset_fake_temporarily(), torch.no_grad():
        arguments = ARGUMENTS[op](scheme)
        on_device = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        got = select(op, on_device, name)(*on_device)
        want = select(op, arguments, REFERENCE)(*arguments)
        if op in _GEMMS:
            error = (got.cpu().float() - want.float()).norm() / want.float().norm()
            return None if error <= _GEMM_ERROR else f"relative error {error:.1e}"
        names = _RESULTS.get(op, ("codes", "scales", "global scale") * 2)
        for which, a, b in zip(names, _tuple(got), _tuple(want), strict=False):
            wrong = (a.cpu().float() != b.float()).sum().item()
            if wrong:
                return f"{wrong} of {b.numel()} {which} differ from the reference"
    return None


_RESULTS = {
    "dequantize": ("numbers",),
    "masked_unrotate": ("numbers",),
    "quantize_masked": ("codes", "scales", "global scale", "mask bytes"),
    "split_scales": ("scales", "global scale"),
}


def _tuple(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def _matrix() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(_SHAPE, generator=generator).to(torch.bfloat16)


def _quantized(scheme: str) -> tuple[torch.Tensor, ...]:
    return torch.ops.q2.quantize(_matrix(), _amax(scheme), None, scheme, 0)


def _amax(scheme: str) -> torch.Tensor | None:
    return torch.ops.q2.amax(_matrix()) if get_scheme(scheme).takes_amax else None


_SEED = torch.tensor(0x123456789ABCDEF)
_FORWARD = "nvfp4_46_pow2"
_OF_FORMAT = {"nvfp4": _FORWARD, "mxfp4": "mxfp4_rtn"}


def _source(scheme: str) -> tuple[str, tuple[torch.Tensor, ...]]:
    """A forward scheme of the same format, its scales swizzled where the scheme's are, and an
    operand in it."""
    spec = get_scheme(scheme)
    source = _OF_FORMAT[spec.format] + (SWIZZLED if spec.swizzled else "")
    return source, _quantized(source)


def _requantize(scheme: str) -> tuple:
    source, packed = _source(scheme)
    return (*packed, _SEED, source, scheme, "rht128", _SHAPE[1], 1)


def _masked_unrotate(scheme: str) -> tuple:
    codes, *_, mask = torch.ops.q2.quantize_masked(_matrix(), scheme, "h32")
    return _matrix().repeat(1, 2)[:, : 2 * codes.shape[1]], mask, "h32"


def _groups() -> tuple[torch.Tensor, torch.Tensor]:
    """Of 3, 137, 0 and 40 of the matrix's 200 rows: chunks of copies, a whole one, rows of none."""
    offs = torch.tensor((3, 140, 140, 180), dtype=torch.int32)
    return offs, torch.ops.q2.padded_ends(offs)


def _requantize_groups(scheme: str) -> tuple:
    source, packed = _source(scheme)
    return (*packed, *_groups(), _SEED, source, scheme, "rht128", _SHAPE[1], 1)


def _grouped_gemm(scheme: str) -> tuple:
    weights = torch.ops.q2.quantize(_matrix()[:192], _amax(scheme), None, scheme, 0)
    schemes = (scheme, scheme)
    return (*_quantized(scheme), *weights, _groups()[0], *schemes, "fprop", torch.bfloat16)


# For each op that has a CUDA kernel, its arguments on the CPU for a scheme.
ARGUMENTS: dict[str, Callable[[str], tuple]] = {
    "quantize": lambda s: (_matrix(), _amax(s), _SEED, s, 0),
    "rht_quantize": lambda s: (_matrix(), _SEED, s, "rht128", True, 1),
    "rht_quantize_both": lambda s: (_matrix(), _SEED, _SEED + 1, s, "rht128", 0),
    "requantize": _requantize,
    "quantize_masked": lambda s: (_matrix(), s, "h32"),
    "masked_unrotate": _masked_unrotate,
    "dequantize": lambda s: (*_quantized(s), s, _SHAPE[1], torch.bfloat16),
    "split_scales": lambda s: (_matrix().float().abs(), s),
    "gemm": lambda s: (*_quantized(s), *_quantized(s), None, s, s, torch.bfloat16),
    "rht_quantize_groups": lambda s: (_matrix(), *_groups(), _SEED, s, "rht128", 1),
    "rht_quantize_groups_both": lambda s: (
        *(_matrix(), *_groups(), _SEED, _SEED + 1, s, "rht128", 0),
    ),
    "requantize_groups": _requantize_groups,
    "grouped_gemm": _grouped_gemm,
    "grouped_mm": lambda s: (_matrix(), _matrix()[:192].unflatten(0, (4, 48)).mT, _groups()[0]),
}


def _with_swizzled(*schemes: str) -> tuple[str, ...]:
    return schemes + tuple(scheme + SWIZZLED for scheme in schemes)


_ROTATED = _with_swizzled(
    *("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_pow2", "nvfp4"),
    *("mxfp4_sr", "mxfp4_rtn34"),
)
_GROUPED = (
    *("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_sr", "nvfp4_pow2", "mxfp4_sr", "mxfp4_rtn34"),
    *("nvfp4_ms_eden_pow2@bf16", "nvfp4_sr_pow2@bf16"),
)
_WIDENED = ("nvfp4_ms_eden_pow2" + WIDENED, "nvfp4_sr_pow2" + WIDENED)
# The schemes that `q2compile doctor` sends through each: those of the recipes' operands.
CHECKED: dict[str, tuple[str, ...]] = {
    "quantize": _with_swizzled("nvfp4_46_pow2", "nvfp4_46", "nvfp4_sr_pow2", "nvfp4_sr"),
    "rht_quantize": _ROTATED + _WIDENED,
    "rht_quantize_both": _ROTATED + _WIDENED,
    "requantize": (
        _with_swizzled("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_sr", "mxfp4_rtn34") + _WIDENED
    ),
    "quantize_masked": _with_swizzled("mxfp4_quest"),
    "masked_unrotate": ("mxfp4_quest",),
    "dequantize": tuple(_OF_FORMAT.values()),
    "split_scales": _with_swizzled("nvfp4_46_pow2", "nvfp4_pow2"),
    "gemm": tuple(_OF_FORMAT.values()),
    "rht_quantize_groups": _GROUPED,
    "rht_quantize_groups_both": _GROUPED,
    "requantize_groups": ("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "mxfp4_rtn34") + _WIDENED,
    "grouped_gemm": tuple(_OF_FORMAT.values()),
    "grouped_mm": (_FORWARD,),
}
