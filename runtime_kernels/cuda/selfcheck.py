"""Small tiles through each CUDA kernel, compared with the torch reference on the CPU.

Quantising kernels must give the reference's bits; GEMMs its numbers, to the rounding of the result,
for every type of result and bias. Used by `q2compile doctor`, and before the first use of a kernel
on a machine: one that disagrees is refused there.

A check runs on a stream of its own, and leaves alone what the caller has set: modes, default
device and type, autocast, the random state. Inside a CUDA graph capture there can be none.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from q2compile.runtime_kernels.cuda import agreements
from q2compile.runtime_kernels.cuda.agreements import Check
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import LaunchError, architecture, unsupported
from q2compile.runtime_kernels.numerics.groups import padded_rows
from q2compile.runtime_kernels.numerics.layout import pack_bits
from q2compile.runtime_kernels.numerics.schemes import SWIZZLED, WIDENED, get_scheme
from q2compile.runtime_kernels.registry import (
    CUDA,
    FAILED,
    REFERENCE,
    failure_text,
    kernels,
    kernels_own,
    select,
    warn_of_failure,
)

_WIDTH = 264  # no multiple of 16 or 128, several tiles
_ROWS = (130, 1)
_COLUMNS = 200  # of a product
_PADDED = 224  # of one that is rotated back
_IN_GROUPS = 200  # rows, of 3, 137, 0 and 40: chunks of copies, a whole one, rows of none
_ENDS = (3, 140, 140, 180)
# Two results that are rounded once each differ by a relative 2^-8 in bf16. What remains is the
# order of the fp32 sums, and how many bits tensor cores keep on the way to them.
GEMM_ERROR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-10}

# Ops of which the format is all that counts in a scheme.
_BY_FORMAT = ("dequantize", "gemm", "gemm_masked_unrotate", "grouped_gemm", "grouped_mm")

# Of a GEMM: the type of its result, that of its bias, and whether scales come swizzled.
Form = tuple[torch.dtype, torch.dtype | None, bool]
FORMS: tuple[Form, ...] = tuple(
    (dtype, bias, swizzled)
    for dtype in GEMM_ERROR
    for bias in (None, dtype)
    for swizzled in (False, True)
)

# Of a grouped GEMM: which of a layer's three it is, and the type of its result.
GroupedForm = tuple[str, torch.dtype]
GROUPED_FORMS: tuple[GroupedForm, ...] = tuple(
    product(("fprop", "dgrad", "wgrad"), (torch.bfloat16, torch.float32))
)

_VERDICTS: dict[Check, str | None] = {}
_RUNNING: set[Check] = set()  # checks under way, which must not ask themselves
_LOCK = threading.RLock()


def refusal(
    op: str, name: str, index: int, scheme: str, form: Form | GroupedForm | None = None
) -> str | None:
    """None when the kernel may be used with a scheme on this CUDA device, otherwise the reason in
    words. form: of a GEMM, grouped or not.

    Raises:
        LaunchError: the kernel is still to be checked, and a CUDA graph is being captured.
    """
    reason = unsupported(index)
    if reason is not None:
        return reason
    check = _check(op, name, index, scheme, form)
    return _VERDICTS[check] if check in _VERDICTS else _refusal(check)


def begin(op: str, index: int, scheme: str) -> None:
    """Has threads compile what the self-check of an op's kernel CUDA launches on this device, if
    the check is still to come: it waits for what is left of that."""
    check = _check(op, CUDA, index, scheme)
    if check in _VERDICTS or agreements.is_kept(check):
        return
    *_, device, scheme, _ = check
    launching = next(k.launching for k in kernels(op) if k.name == CUDA)
    with apart(torch.device("cpu")):
        arguments = ARGUMENTS[op](scheme)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for launch in launching.launches(*_on(device, arguments)):
                nvrtc.begin(launch.variant, architecture(index))


def _check(
    op: str, name: str, index: int, scheme: str, form: Form | GroupedForm | None = None
) -> Check:
    if op in _BY_FORMAT:
        scheme = _OF_FORMAT[get_scheme(scheme).format]
    return op, name, torch.device("cuda", index), scheme, form


def _refusal(check: Check) -> str | None:
    op, name, device, scheme, form = check
    with _LOCK:
        if check in _VERDICTS:
            return _VERDICTS[check]
        if check in _RUNNING:
            return None
        if torch.cuda.is_current_stream_capturing() and not agreements.is_kept(check):
            raise LaunchError(
                f"kernel {name!r} of q2::{op} is to be checked on this GPU before its first use, "
                "which cannot be done inside a CUDA graph capture: run the model once before "
                "capturing it."
            )
        _RUNNING.add(check)
        try:
            forms = () if form is None else ((form,),)
            differs = functools.partial(disagreement, op, name, device, scheme, *forms)
            return judge(_VERDICTS, check, differs)
        finally:
            _RUNNING.discard(check)


def judge(
    verdicts: dict[Check, str | None],
    check: Check,
    differs: Callable[[], str | None],
    sources: Sequence[Path] = (),
) -> str | None:
    """Notes in `verdicts`, and returns, None when a kernel agrees with the reference, otherwise why
    it is given up, of which it warns. That it agrees is kept on disk, and not asked again.

    check: the op, the kernel's name, the device, and with what.  differs: None, or how the results
    differ.  sources: as of `agreements.is_kept`.

    Raises:
        Exception: what `differs` raises, where that is not the kernel's fault.
    """
    if agreements.is_kept(check, sources):
        verdicts[check] = None
        return None
    op, name, device, *_ = check
    try:
        reason = differs()
        reason = reason and f"{FAILED} its self-check on this GPU: {reason}"
    except Exception as error:
        if not kernels_own(error, device):
            raise
        reason = failure_text(error)
    verdicts[check] = reason
    if reason is None:
        agreements.keep(check, sources)
    else:
        warn_of_failure(op, name, device, reason)
    return reason


def disagreement(
    op: str,
    name: str,
    device: torch.device,
    scheme: str,
    forms: Sequence[Form | GroupedForm] | None = None,
) -> str | None:
    """Runs kernel `name` of an op on small inputs of a scheme: None when it agrees with the
    reference, otherwise how it differs.

    forms: of a GEMM, by default all; those that the kernel declines are left out, if it takes any.

    Raises:
        ValueError: the kernel does not serve this device or scheme.
    """
    with apart(device):
        if op == "grouped_mm":
            return _of_gemm(op, name, device, ARGUMENTS[op](scheme))
        if op not in _CASES:
            cases = [ARGUMENTS[op](scheme, rows) for rows in _ROWS]
            differences = (_of_quantiser(op, name, device, arguments) for arguments in cases)
            return next(filter(None, differences), None)
        declined: ValueError | None = None
        agreed = False
        for arguments, words in _CASES[op](scheme, forms):
            try:
                difference = _of_gemm(op, name, device, arguments)
            except Declined as error:
                declined = error
                continue
            if difference is not None:
                return f"{difference}, of {words}"
            agreed = True
        if declined is not None and not agreed:
            raise declined
    return None


def _gemm_cases(scheme: str, forms: Sequence | None) -> Iterator[tuple[tuple, str]]:
    """Arguments, and what they are of in words."""
    quantized = functools.cache(_quantized)
    sources = _OF_GEMM[get_scheme(scheme).format]
    for form, source, rows in product(forms or FORMS, sources, _ROWS):
        yield _gemm(source, rows, form, quantized), f"a result of {_words(form, rows)}"


def _unrotated_cases(scheme: str, forms: Sequence | None) -> Iterator[tuple[tuple, str]]:
    quantized = functools.cache(_quantized)
    unbiased = [form for form in FORMS if form[1] is None]
    sources = _OF_GEMM[get_scheme(scheme).format]
    for form, source, rows in product(forms or unbiased, sources, _ROWS):
        words = f"a result of {rows} x {_PADDED} in {form[0]}, masked and rotated back"
        yield _gemm_masked_unrotate(source, rows, form, quantized), words


def _grouped_cases(scheme: str, forms: Sequence | None) -> Iterator[tuple[tuple, str]]:
    sources = _OF_GEMM[get_scheme(scheme).format]
    for form, source in product(forms or GROUPED_FORMS, sources):
        yield _grouped_gemm(source, form), f"{form[0]} in {form[1]}"


# Of a GEMM, grouped or not: what is run.
_CASES: dict[str, Callable[[str, Sequence | None], Iterator[tuple[tuple, str]]]] = {
    "gemm": _gemm_cases,
    "gemm_masked_unrotate": _unrotated_cases,
    "grouped_gemm": _grouped_cases,
}


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """Without the caller's modes and settings, and on a CUDA device on a stream of its own."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.device("cpu"))
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
        yield


def _of_quantiser(op: str, name: str, device: torch.device, arguments: tuple) -> str | None:
    on_device = _on(device, arguments)
    got = select(op, on_device, name)(*on_device)
    want = select(op, arguments, REFERENCE)(*arguments)
    return difference_of_bits(op, got, want)


def difference_of_bits(op: str, got, want) -> str | None:
    """How the results of an op differ from its reference's, which are on the CPU; None when they
    are the same numbers."""
    names = _RESULTS.get(op, ("codes", "scales", "global scale") * 2)
    for which, a, b in zip(names, _tuple(got), _tuple(want), strict=False):
        wrong = (a.cpu().float() != b.float()).sum().item()
        if wrong:
            return f"{wrong} of {b.numel()} {which} differ from the reference"
    return None


class Declined(ValueError):
    """A kernel does not take a form of GEMM."""


def _of_gemm(op: str, name: str, device: torch.device, arguments: tuple) -> str | None:
    on_device = _on(device, arguments)
    try:
        function = select(op, on_device, name)
    except ValueError as error:
        if FAILED in str(error):  # in this form: given up, not declined
            raise
        raise Declined(*error.args) from error
    got = function(*on_device).cpu().float()
    want = select(op, arguments, REFERENCE)(*arguments)
    off = (got - want.float()).norm() / want.float().norm()
    return None if off <= GEMM_ERROR[want.dtype] else f"relative error {off:.1e}"


def _words(form: Form, rows: int) -> str:
    dtype, bias, swizzled = form
    parts = [f"{rows} x {_COLUMNS} in {dtype}"]
    parts += [f"with a bias in {bias}"] * (bias is not None) + ["from swizzled scales"] * swizzled
    return " ".join(parts)


def _on(device: torch.device, arguments: tuple) -> list:
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]


_RESULTS = {
    "dequantize": ("numbers",),
    "masked_unrotate": ("numbers",),
    "padded_ends": ("ends",),
    "signs": ("signs",),
    "quantize_masked": ("codes", "scales", "global scale", "mask bytes"),
    "rht_quantize_summed": ("codes", "scales", "global scale", "sums"),
    "rht_quantize_both_summed": (*("codes", "scales", "global scale") * 2, "sums"),
    "split_scales": ("scales", "global scale"),
    "transpose": ("codes", "scales"),
}


def _tuple(result) -> Sequence[torch.Tensor]:
    return result if isinstance(result, tuple | list) else (result,)


def _matrix(rows: int, width: int = _WIDTH) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(rows)
    x = torch.randn((rows, width), generator=generator, dtype=torch.float32, device="cpu")
    return x.to(torch.bfloat16)


def _quantized(scheme: str, rows: int, width: int = _WIDTH) -> tuple[torch.Tensor, ...]:
    amax = _amax(scheme, rows, width)
    return torch.ops.q2.quantize(_matrix(rows, width), amax, None, scheme, 0)


def _amax(scheme: str, rows: int, width: int = _WIDTH) -> torch.Tensor | None:
    return torch.ops.q2.amax(_matrix(rows, width)) if get_scheme(scheme).takes_amax else None


def _seed(offset: int = 0) -> torch.Tensor:
    return torch.tensor(0x123456789ABCDEF + offset, device="cpu")


_FORWARD = "nvfp4_46_pow2"
_OF_FORMAT = {"nvfp4": _FORWARD, "mxfp4": "mxfp4_rtn"}
# Of these one has a global scale that operands can take along, and one has another.
_OF_GEMM = {"nvfp4": (_FORWARD, "nvfp4_46"), "mxfp4": ("mxfp4_rtn", "mxfp4_rtn34")}


def _source(scheme: str, rows: int) -> tuple[str, tuple[torch.Tensor, ...]]:
    """A forward scheme of the same format, its scales swizzled where the scheme's are, and an
    operand in it."""
    spec = get_scheme(scheme)
    source = _OF_FORMAT[spec.format] + (SWIZZLED if spec.swizzled else "")
    return source, _quantized(source, rows)


def _requantize(scheme: str, rows: int, by_scales: bool = False) -> tuple:
    source, packed = _source(scheme, rows)
    how = _seed(), source, scheme, "rht128"
    return (_matrix(rows), *packed[1:], *how, 1) if by_scales else (*packed, *how, _WIDTH, 1)


def _summed(scheme: str, rows: int, both: bool = False) -> tuple:
    """Of so many rows that a thread adds up more than one tile."""
    seeds = (_seed(), _seed(1)) if both else (_seed(),)
    return (_matrix(8 * rows), *seeds, scheme, "rht128", 0, torch.bfloat16)


def _masked_unrotate(scheme: str, rows: int) -> tuple:
    codes, *_, mask = torch.ops.q2.quantize_masked(_matrix(rows), scheme, "h32")
    return _matrix(rows).repeat(1, 2)[:, : 2 * codes.shape[1]], mask, "h32"


def _gemm(
    scheme: str, rows: int, form: Form = FORMS[0], quantized: Callable[..., tuple] = _quantized
) -> tuple:
    dtype, bias_dtype, swizzled = form
    name = scheme.removesuffix(SWIZZLED) + (SWIZZLED if swizzled else "")
    bias = None if bias_dtype is None else 4 * _matrix(_COLUMNS)[:, 0].to(bias_dtype)
    return (*quantized(name, rows), *quantized(name, _COLUMNS), bias, name, name, dtype)


def _gemm_masked_unrotate(
    scheme: str, rows: int, form: Form = FORMS[0], quantized: Callable[..., tuple] = _quantized
) -> tuple:
    """The mask keeps every other number or so: one that is not applied is seen."""
    dtype, _, swizzled = form
    name = scheme.removesuffix(SWIZZLED) + (SWIZZLED if swizzled else "")
    mask = pack_bits(_matrix(rows, _PADDED) > 0)
    return (*quantized(name, rows), *quantized(name, _PADDED), mask, name, name, "h32", dtype)


def _ends(groups: int) -> torch.Tensor:
    """Of groups of 0 to 198 rows."""
    sizes = 99 * torch.arange(groups, dtype=torch.int32, device="cpu").remainder(3)
    return sizes.cumsum(0, dtype=torch.int32)


def _groups() -> tuple[torch.Tensor, torch.Tensor]:
    offs = torch.tensor(_ENDS, dtype=torch.int32, device="cpu")
    return offs, torch.ops.q2.padded_ends(offs)


def _requantize_groups(scheme: str) -> tuple:
    source, packed = _source(scheme, _IN_GROUPS)
    return (*packed, *_groups(), _seed(), source, scheme, "rht128", _WIDTH, 1)


def _grouped_gemm(scheme: str, form: GroupedForm = GROUPED_FORMS[0]) -> tuple:
    """With weights [48, 264] in fprop, [40, 128] in dgrad, and [40, 48] in wgrad."""
    gemm, dtype = form
    offs, padded_offs = _groups()
    experts = len(_ENDS)
    contracted = padded_rows(_IN_GROUPS, experts)
    a, b = {
        "fprop": ((_IN_GROUPS, _WIDTH), (48 * experts, _WIDTH)),
        "dgrad": ((_IN_GROUPS, 128), (40, 128 * experts)),
        "wgrad": ((40, contracted), (48, contracted)),
    }[gemm]
    ends = padded_offs if gemm == "wgrad" else offs
    return (*_quantized(scheme, *a), *_quantized(scheme, *b), ends, scheme, scheme, gemm, dtype)


def _grouped_mm(scheme: str) -> tuple:
    weights = _matrix(48 * len(_ENDS)).unflatten(0, (len(_ENDS), 48)).mT
    return (_matrix(_IN_GROUPS), weights, _groups()[0])


# For each op that has a CUDA kernel, its arguments on the CPU for a scheme and rows of its operand.
ARGUMENTS: dict[str, Callable[..., tuple]] = {
    "quantize": lambda s, t=_ROWS[0]: (_matrix(t), _amax(s, t), _seed(), s, 0),
    "rht_quantize": lambda s, t=_ROWS[0]: (_matrix(t), _seed(), s, "rht128", True, 1),
    "rht_quantize_both": lambda s, t=_ROWS[0]: (_matrix(t), _seed(), _seed(1), s, "rht128", 0),
    "rht_quantize_summed": lambda s, t=_ROWS[0]: _summed(s, t),
    "rht_quantize_both_summed": lambda s, t=_ROWS[0]: _summed(s, t, both=True),
    "requantize": lambda s, t=_ROWS[0]: _requantize(s, t),
    "requantize_by_scales": lambda s, t=_ROWS[0]: _requantize(s, t, by_scales=True),
    "quantize_masked": lambda s, t=_ROWS[0]: (_matrix(t), s, "h32"),
    "masked_unrotate": lambda s, t=_ROWS[0]: _masked_unrotate(s, t),
    "dequantize": lambda s, t=_ROWS[0]: (*_quantized(s, t), s, _WIDTH, torch.bfloat16),
    "padded_ends": lambda s, t=_ROWS[0]: (_ends(t),),
    "signs": lambda s, t=_ROWS[0]: (_seed(), "rht128"),
    "split_scales": lambda s, t=_ROWS[0]: (_matrix(t).float().abs(), s),
    "transpose": lambda s, t=_ROWS[0]: (*_quantized(s, t)[:2], s, _WIDTH, True),
    "gemm": lambda s, t=_ROWS[0]: _gemm(s, t),
    "gemm_masked_unrotate": lambda s, t=_ROWS[0]: _gemm_masked_unrotate(s, t),
    "rht_quantize_groups": lambda s, t=_IN_GROUPS: (
        *(_matrix(_IN_GROUPS), *_groups(), _seed(), s, "rht128", 1),
    ),
    "rht_quantize_groups_both": lambda s, t=_IN_GROUPS: (
        *(_matrix(_IN_GROUPS), *_groups(), _seed(), _seed(1), s, "rht128", 0),
    ),
    "requantize_groups": lambda s, t=_IN_GROUPS: _requantize_groups(s),
    "grouped_gemm": lambda s, t=_IN_GROUPS: _grouped_gemm(s),
    "grouped_mm": lambda s, t=_IN_GROUPS: _grouped_mm(s),
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
_SUMMED = _with_swizzled(
    *("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_pow2", "mxfp4_sr", "mxfp4_rtn34")
)
_WIDENED = ("nvfp4_ms_eden_pow2" + WIDENED, "nvfp4_sr_pow2" + WIDENED)
# The schemes that `q2compile doctor` sends through each: those of the recipes' operands.
CHECKED: dict[str, tuple[str, ...]] = {
    "quantize": (
        *_with_swizzled("nvfp4_46_pow2", "nvfp4_46", "nvfp4_sr_pow2", "nvfp4_sr"),
        *("nvfp4_46_pow2" + WIDENED, "nvfp4_sr_pow2" + WIDENED),
    ),
    "rht_quantize": _ROTATED + _WIDENED,
    "rht_quantize_both": _ROTATED + _WIDENED,
    "rht_quantize_summed": _SUMMED + _WIDENED,
    "rht_quantize_both_summed": _SUMMED + _WIDENED,
    "requantize": (
        _with_swizzled("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "nvfp4_sr", "mxfp4_rtn34") + _WIDENED
    ),
    "requantize_by_scales": _with_swizzled("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2") + _WIDENED,
    "quantize_masked": _with_swizzled("mxfp4_quest"),
    "masked_unrotate": ("mxfp4_quest",),
    "dequantize": tuple(_OF_FORMAT.values()),
    "padded_ends": ("nvfp4",),
    "signs": ("nvfp4",),
    "split_scales": _with_swizzled("nvfp4_46_pow2", "nvfp4_pow2"),
    "transpose": ("nvfp4_16x16_pow2",),
    "gemm": tuple(_OF_FORMAT.values()),
    "gemm_masked_unrotate": tuple(_OF_FORMAT.values()),
    "rht_quantize_groups": _GROUPED,
    "rht_quantize_groups_both": _GROUPED,
    "requantize_groups": ("nvfp4_ms_eden_pow2", "nvfp4_sr_pow2", "mxfp4_rtn34") + _WIDENED,
    "grouped_gemm": tuple(_OF_FORMAT.values()),
    "grouped_mm": (_FORWARD,),
}
