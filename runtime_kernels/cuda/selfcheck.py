# SPDX-License-Identifier: Apache-2.0
"""Self-checks: each CUDA kernel on small operands, compared with the torch reference on the CPU.

Quantizing kernels must give the reference's bits. GEMMs must give its values up to the rounding of
the result, for every dtype of result and bias. `q2compile doctor` runs them, and so does the first
use of a kernel on a machine: a kernel that differs is rejected there (checks.py).

A check changes no state of the caller: modes, default device and dtype, autocast, random state.
None can run inside a CUDA graph capture.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from q2compile.runtime_kernels.choice import kernels
from q2compile.runtime_kernels.cuda import checks
from q2compile.runtime_kernels.cuda.calls import Launching
from q2compile.runtime_kernels.cuda.check_results import Request
from q2compile.runtime_kernels.cuda.checked_cases import (
    BY_FORMAT,
    CASES,
    GEMM_ERROR,
    OF_FORMAT,
    RESULTS,
    CheckKey,
    Form,
    GroupedForm,
    arguments_of,
    cases_of,
)
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import (
    Launch,
    architecture,
    empty,
    on_one_multiprocessor,
    unsupported,
)
from q2compile.runtime_kernels.kernel_states import UNSUPPORTED, NotServedError, assumed_capability
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.ops.table import (
    SPECS,
    QuantizerCall,
    QuantizerVariant,
)
from q2compile.runtime_kernels.registry import CUDA, REFERENCE, select

_MIB = 1 << 20
# The subject of a check, in addition to op and scheme.
What = Form | GroupedForm | QuantizerVariant | CheckKey | None


def rejection(op: str, name: str, index: int, scheme: str, what: What = None) -> str | None:
    """None if the kernel may be used with a scheme on this CUDA device, otherwise the reason in
    words. what: the form of a GEMM, grouped or not; the variant of a quantizer and how it is used.

    Raises:
        LaunchError: the kernel is still to be checked, and a CUDA graph is being captured.
    """
    if get_scheme(scheme).is_tensorwise:
        return f"it reads and writes FP4; PyTorch's own operations serve {scheme}"
    if assumed_capability():
        return None
    return unsupported(index) or checks.rejection(request_of(op, name, index, scheme, what))


def compiling(
    op: str,
    name: str,
    device: torch.device,
    scheme: str,
    of: Sequence[Form | GroupedForm] | QuantizerVariant | CheckKey | None = None,
) -> list[Future]:
    """Threads that compile what `disagreement` launches; a GEMM compiles its kernels itself."""
    if name != CUDA or all(k.launching is None for k in kernels(op) if k.name == CUDA):
        return []
    checked = of if isinstance(of, QuantizerVariant | CheckKey) else op
    return begin_compiling(launches_of(op, cases_of(checked, scheme), device), device.index)


def request_of(op: str, name: str, index: int, scheme: str, what: What = None) -> Request:
    """A self-check of this module."""
    if op in BY_FORMAT:
        scheme = OF_FORMAT[get_scheme(scheme).format]
    device = torch.device("cuda", index)
    of = (what,) if op in SPECS else ((what,),) if what is not None else ()
    return Request((op, name, device, scheme, what), __name__, (op, name, device, scheme, *of))


def launches_of(op: str, cases: Iterable[tuple], device: torch.device) -> list[Launch]:
    """The launches that kernel CUDA of an op may make. cases: arguments on the CPU; an iterator
    makes them undisturbed by the caller's modes."""
    launching = next(k.launching for k in kernels(op) if k.name == CUDA)
    with apart(torch.device("cpu")):
        made = list(cases)
        with FakeTensorMode(allow_non_fake_inputs=True):
            return [each for args in made for each in launching.launches(*_on(device, args))]


def fakes_on(device: torch.device, arguments: tuple) -> list:
    """The arguments of a case on a device, without values: enough to ask which kernels serve."""
    with apart(torch.device("cpu")), FakeTensorMode(allow_non_fake_inputs=True):
        return _on(device, arguments)


def begin_compiling(launches: Iterable[Launch], index: int) -> list[Future]:
    """Threads that compile these launches for a device."""
    variants = dict.fromkeys(launch.variant for launch in launches)
    return [nvrtc.begin(variant, architecture(index)) for variant in variants]


def disagreement(
    op: str,
    name: str,
    device: torch.device,
    scheme: str,
    of: Sequence[Form | GroupedForm] | QuantizerVariant | CheckKey | None = None,
) -> str | None:
    """Runs kernel `name` of an op on small inputs of a scheme: None when it agrees with the
    reference, otherwise how it differs.

    of: the variant of a quantizer; forms of a GEMM, by default all; unsupported ones are left out,
        unless all are.

    Raises:
        ValueError: the kernel does not serve this device or scheme.
    """
    with apart(device):
        if op == "grouped_mm":
            return _of_gemm(op, name, device, arguments_of(op, scheme))
        if isinstance(of, QuantizerVariant | CheckKey) or op not in CASES:
            checked = of if isinstance(of, QuantizerVariant | CheckKey) else op
            differences = (_bits_of(op, name, device, args) for args in cases_of(checked, scheme))
            return next(filter(None, differences), None)
        unsupported_form: ValueError | None = None
        agreed = False
        for arguments, words, in_training in CASES[op](scheme, of):
            try:
                with on_one_multiprocessor() if in_training else nullcontext():
                    difference = _of_gemm(op, name, device, arguments)
            except UnsupportedForm as error:
                unsupported_form = error
                continue
            if difference is not None:
                return f"{difference}, of {words}"
            agreed = True
        if unsupported_form is not None and not agreed:
            raise unsupported_form
    return None


@contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """A context without the caller's modes and settings; on a CUDA device, on its own stream."""
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


def difference_on_any_grid(difference: Callable[[], str | None]) -> str | None:
    """Runs twice what plans and launches: with a thread block for each tile, if there are enough
    multiprocessors, and with several tiles for each thread block, whose loop has stages and
    barriers. Returns what it returns if that is not None."""
    found = difference()
    if found is None:
        with on_one_multiprocessor():
            found = difference()
        found = found and f"{found}, with several tiles for each thread block"
    return found


def _bits_of(op: str, name: str, device: torch.device, arguments: tuple) -> str | None:
    on_device = _on(device, arguments)
    function = select(op, on_device, name)
    want = select(op, arguments, REFERENCE)(*arguments)
    names = QuantizerCall.of(op, arguments).outputs if op in SPECS else RESULTS[op]
    if not isinstance(function, Launching):
        return difference_of_bits(function(*on_device), want, names)
    return difference_on_any_grid(
        lambda: difference_of_bits(function.planned_anew(*on_device), want, names)
    )


def difference_of_bits(got, want, names: Sequence[str]) -> str | None:
    """How the results of an op, of these names, differ from its reference's, which are on the CPU;
    None if all values are equal."""
    for which, a, b in zip(names, _tuple(got), _tuple(want), strict=False):
        wrong = (a.cpu().float() != b.float()).sum().item()
        if wrong:
            return f"{wrong} of {b.numel()} {which} differ from the reference"
    return None


class UnsupportedForm(ValueError):
    """A kernel does not support a form of GEMM."""


def _of_gemm(op: str, name: str, device: torch.device, arguments: tuple) -> str | None:
    on_device = _on(device, arguments)
    try:
        function = select(op, on_device, name)
    except NotServedError as error:
        if error.state != UNSUPPORTED:
            raise
        raise UnsupportedForm(*error.args) from error
    if reuses_memory(device):
        leave_nans()
    got = function(*on_device).cpu().float()
    want = select(op, arguments, REFERENCE)(*arguments)
    off = (got - want.float()).norm() / want.float().norm()
    return None if off <= GEMM_ERROR[want.dtype] else f"relative error {off:.1e}"


def reuses_memory(device: torch.device) -> bool:
    """Whether an allocator hands out memory as its last owner left it."""
    return device.type == "cuda"


def leave_nans() -> None:
    """Fills 64 MiB of the current CUDA device with NaN, and frees them. The results and workspaces
    of the next GEMM are allocated there, and a GEMM that multiplies what it finds by 0 shows. The
    allocator has blocks for small tensors and for large ones."""
    with suppress(torch.OutOfMemoryError):
        blocks = [empty((size,), (1,), torch.uint8) for size in (32 * _MIB, *32 * [_MIB])]
        for block in blocks:
            block.fill_(255)  # NaN in every dtype, also of fp8 and of scales


def _on(device: torch.device, arguments: tuple) -> list:
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]


def _tuple(result) -> Sequence[torch.Tensor]:
    return result if isinstance(result, tuple | list) else (result,)
