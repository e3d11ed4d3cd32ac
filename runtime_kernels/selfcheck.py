# SPDX-License-Identifier: Apache-2.0
"""Self-checks: a kernel on small calls like the one that asks for it (small_calls.py), compared
with the torch reference on the CPU.

Quantizing kernels must give the reference's bits. GEMMs must give its values up to the rounding of
the result. `q2compile doctor` runs them, and so does the first use of a kernel on a machine: a
kernel that differs is rejected there (checks.py).

A check changes no state of the caller: modes, default device and dtype, autocast, random state.
None can run inside a CUDA graph capture.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import empty
from torch.utils._python_dispatch import _disable_current_modes

from q2compile.runtime_kernels.check_results import Request
from q2compile.runtime_kernels.choice import device_of, kernel_named
from q2compile.runtime_kernels.kernel_states import (
    UNSUPPORTED,
    NotServedError,
    on_one_multiprocessor,
)
from q2compile.runtime_kernels.registry import CPP, REFERENCE, select
from q2compile.runtime_kernels.small_calls import (
    PRODUCTS,
    Form,
    form_of,
    outputs_of,
    small_calls,
)

_NANS = (32 << 20, *32 * [1 << 20])  # bytes
# Two results that are rounded once each differ by a relative 2^-8 in bf16. What remains is the
# order of the fp32 sums, and how many bits tensor cores keep on the way to them.
GEMM_ERROR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-10}


def check_of(op: str, name: str, *args: Any) -> Request:
    """The self-check of kernel `name` of an op for such a call. args: all arguments, which may be
    fake."""
    return request_of(name, device_of(args), form_of(op, args))


def request_of(name: str, device: torch.device, form: Form) -> Request:
    """The self-check of kernel `name` for calls of this form. On a CPU it takes milliseconds."""
    here = device.type == "cpu" and name == CPP
    return Request((form.op, name, device, form), __name__, (name, device, form), here=here)


def compiling(name: str, device: torch.device, form: Form) -> list[Future]:
    """Threads that compile what `disagreement` launches; a GEMM compiles its kernels itself."""
    launching = kernel_named(form.op, name).launching
    if launching is None:
        return []
    with apart(torch.device("cpu")):
        cases = [call.args for call in small_calls(form)]
    found: list[Future] = launching.begin_compiling(cases, device)
    return found


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
    on_device, names = moved_to(device, args), outputs_of(form)
    function = select(form.op, on_device, name)
    try:
        want = select(form.op, args, REFERENCE)(*args)
    except Exception as error:
        what = f"the reference raises {type(error).__name__}: {error}"
        raise NotServedError(what, UNSUPPORTED) from error
    if form.op in PRODUCTS and name != CPP:
        return _difference_of_products(function, on_device, want)

    def difference() -> str | None:
        return difference_of_bits(function(*on_device), want, names)

    has_grids = kernel_named(form.op, name).launching is not None
    return difference_on_any_grid(difference) if has_grids else difference()


def difference_of_bits(got, want, names: Sequence[str]) -> str | None:
    """How the results of an op, of these names, differ from its reference's, which are on the CPU;
    None if all values are equal."""
    for which, a, b in zip(names, as_tuple(got), as_tuple(want), strict=False):
        wrong = (a.cpu().float() != b.float()).sum().item()
        if wrong:
            return f"{wrong} of {b.numel()} {which} differ from the reference"
    return None


def _difference_of_products(function: Callable, on_device: list, want: torch.Tensor) -> str | None:
    if reuses_memory(on_device[0].device):
        leave_nans(on_device[0].device)
    got = function(*on_device).cpu().float()
    off = (got - want.float()).norm() / want.float().norm()
    return None if off <= GEMM_ERROR[want.dtype] else f"relative error {off:.1e}"


def reuses_memory(device: torch.device) -> bool:
    """Whether an allocator hands out memory as its last owner left it."""
    return device.type == "cuda"


def leave_nans(device: torch.device) -> None:
    """Fills 64 MiB of a CUDA device with NaN, and frees them. The results and workspaces
    of the next GEMM are allocated there, and a GEMM that multiplies what it finds by 0 shows. The
    allocator has blocks for small tensors and for large ones."""
    with suppress(torch.OutOfMemoryError):
        blocks = [empty(size, dtype=torch.uint8, device=device) for size in _NANS]
        for block in blocks:
            block.fill_(255)  # NaN in every dtype, also of fp8 and of scales


def moved_to(device: torch.device, arguments: Sequence) -> list:
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]


def as_tuple(result) -> Sequence[torch.Tensor]:
    return result if isinstance(result, tuple | list) else (result,)
