# SPDX-License-Identifier: Apache-2.0
"""Self-checks: a kernel on small calls like the one that asks for it (small_calls.py), compared
with the torch reference on the CPU.

Quantizing kernels must give the reference's bits. GEMMs must give its values up to the rounding of
the result. `q2compile doctor` runs them, and so does the first use of a kernel on a machine: a
kernel that differs is rejected there (checks.py).

A check changes no state of the caller: modes, default device and dtype, autocast, random state.
None can run inside a CUDA graph capture.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from q2compile.runtime_kernels.choice import device_of, kernels
from q2compile.runtime_kernels.cuda import checks
from q2compile.runtime_kernels.cuda.calls import Launching
from q2compile.runtime_kernels.cuda.check_results import Request
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
from q2compile.runtime_kernels.ops.table import QUANTIZE, TRANSPOSE
from q2compile.runtime_kernels.registry import CPP, CUDA, REFERENCE, select
from q2compile.runtime_kernels.small_calls import (
    PRODUCTS,
    Form,
    form_of,
    outputs_of,
    places_of_schemes,
    small_calls,
)

_MIB = 1 << 20
# Two results that are rounded once each differ by a relative 2^-8 in bf16. What remains is the
# order of the fp32 sums, and how many bits tensor cores keep on the way to them.
GEMM_ERROR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-10}


def rejection(op: str, name: str, args: Sequence[Any], aligned: bool = True) -> str | None:
    """None if kernel `name` of an op may be used for such a call on a CUDA device, otherwise the
    reason in words. args: all arguments, which may be fake.  aligned: as in a Form.

    Raises:
        LaunchError: the kernel is still to be checked, and a CUDA graph is being captured.
    """
    for place in places_of_schemes(op):
        if get_scheme(args[place]).is_tensorwise and op not in (QUANTIZE, TRANSPOSE):
            return f"it reads and writes FP4; PyTorch's own operations serve {args[place]}"
    if assumed_capability():
        return None
    device = device_of(args)
    request = request_of(name, device, form_of(op, args, aligned))
    return unsupported(device.index) or checks.rejection(request)


def request_of(name: str, device: torch.device, form: Form) -> Request:
    """The self-check of kernel `name` for calls of this form."""
    return Request((form.op, name, device, form), __name__, (name, device, form))


def compiling(name: str, device: torch.device, form: Form) -> list[Future]:
    """Threads that compile what `disagreement` launches; a GEMM compiles its kernels itself."""
    if name != CUDA or all(k.launching is None for k in kernels(form.op) if k.name == CUDA):
        return []
    cases = (call.args for call in small_calls(form))
    return begin_compiling(launches_of(form.op, cases, device), device.index)


def launches_of(op: str, cases: Iterable[tuple], device: torch.device) -> list[Launch]:
    """The launches that kernel CUDA of an op may make. cases: arguments on the CPU; an iterator
    makes them undisturbed by the caller's modes."""
    launching = next(k.launching for k in kernels(op) if k.name == CUDA)
    with apart(torch.device("cpu")):
        made = list(cases)
        with FakeTensorMode(allow_non_fake_inputs=True):
            return [each for args in made for each in launching.launches(*_on(device, args))]


def begin_compiling(launches: Iterable[Launch], index: int) -> list[Future]:
    """Threads that compile these launches for a device."""
    variants = dict.fromkeys(launch.variant for launch in launches)
    return [nvrtc.begin(variant, architecture(index)) for variant in variants]


def disagreement(name: str, device: torch.device, form: Form) -> str | None:
    """Runs kernel `name` of an op on small calls of a form: None when it agrees with the reference,
    otherwise how it differs. Calls that it does not serve are left out, unless it serves none.

    Raises:
        ValueError: the kernel does not serve this device or form.
    """
    not_served: NotServedError | None = None
    agreed = False
    with apart(device):
        for args, words, in_training in small_calls(form):
            try:
                with on_one_multiprocessor() if in_training else nullcontext():
                    found = _difference(form, name, device, args)
            except NotServedError as error:
                if error.state != UNSUPPORTED:
                    raise
                not_served = error
                continue
            if found is not None:
                return f"{found}, of {words}" if words else found
            agreed = True
    if not_served is not None and not agreed:
        raise not_served
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


def _difference(form: Form, name: str, device: torch.device, args: tuple) -> str | None:
    on_device, names = _on(device, args), outputs_of(form)
    function = select(form.op, on_device, name)
    try:
        want = select(form.op, args, REFERENCE)(*args)
    except Exception as error:
        what = f"the reference raises {type(error).__name__}: {error}"
        raise NotServedError(what, UNSUPPORTED) from error
    if form.op in PRODUCTS and name != CPP:
        return _difference_of_products(function, on_device, want)
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


def _difference_of_products(function: Callable, on_device: list, want: torch.Tensor) -> str | None:
    if reuses_memory(on_device[0].device):
        leave_nans()
    got = function(*on_device).cpu().float()
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
