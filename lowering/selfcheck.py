"""The loops that Inductor makes of a quantising op, compared with the torch reference before their
first use on a machine.

The rules are checked by tests; what stands between them and a GPU are Inductor, Triton and ptxas.
So a small graph is compiled for the device, a product with one half and the quantiser that fuses
with it, and its codes and scales must be the reference's bits. That costs a small compilation for
each scheme of a recipe's forward, once.

It is compiled in a thread of its own, since Inductor keeps what it is at work on by thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.lowering import register
from q2compile.runtime_kernels.cuda.selfcheck import apart, difference_of_bits, judge
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.registry import LOOPS
from q2compile.torch_internals.inductor import compile_by_itself
from q2compile.torch_internals.patches import patched

_SHAPE = (130, 264)
_VERDICTS: dict[tuple, str | None] = {}  # None also while a check is under way


def refusal(
    op: str, device: torch.device, scheme: str, transform: str = "none", transpose: bool = False
) -> str | None:
    """None when the loops of an op may be used with a scheme on this device, otherwise the reason
    in words."""
    if _is_known(device):
        return None
    check = (op, LOOPS, device, scheme, transform, transpose)
    if check not in _VERDICTS:
        _VERDICTS[check] = None
        differs = functools.partial(disagreement, op, device, scheme, transform, transpose)
        try:
            judge(_VERDICTS, check, differs, (Path(__file__).parent,))
        except Exception:
            if _VERDICTS[check] is None:
                del _VERDICTS[check]
            raise
    return _VERDICTS[check]


def _is_known(device: torch.device) -> bool:
    """What Inductor makes for a CPU the tests check."""
    return device.type != "cuda"


def is_refused(op: str, device: torch.device, scheme: str, transform: str = "none") -> bool:
    """Whether a check that was run has refused them."""
    return any(
        reason is not None and check[:5] == (op, LOOPS, device, scheme, transform)
        for check, reason in _VERDICTS.items()
    )


def disagreement(
    op: str, device: torch.device, scheme: str, transform: str = "none", transpose: bool = False
) -> str | None:
    """Compiles the loops for a device and runs them: None when they agree with the reference,
    otherwise how they differ.

    Raises:
        Exception: whatever Inductor, Triton or the driver raises.
    """
    register()
    settings = copy_context()  # the caller's, of Inductor
    with ThreadPoolExecutor(1) as pool:
        check = functools.partial(_disagreement, op, device, scheme, transform, transpose)
        return pool.submit(settings.run, check).result()


def _disagreement(
    op: str, device: torch.device, scheme: str, transform: str, transpose: bool
) -> str | None:
    with apart(device):
        generator = torch.Generator("cpu").manual_seed(1)
        x = torch.randn(_SHAPE, generator=generator, dtype=torch.float32).bfloat16()
        seed = torch.tensor(0x123456789ABCDEF)
        amax = (x / 2).abs().amax().float() if get_scheme(scheme).takes_amax else None

        def function(x: torch.Tensor, seed: torch.Tensor, amax: torch.Tensor | None) -> tuple:
            if op == "quantize":
                return torch.ops.q2.quantize(x / 2, amax, seed, scheme, 0)
            return torch.ops.q2.rht_quantize(x / 2, seed, scheme, transform, transpose, 0)

        want = function(x, seed, amax)
        inputs = [None if a is None else a.to(device) for a in (x, seed, amax)]
        return difference_of_bits(op, _compiled(function, inputs)(*inputs), want)


def _compiled(function: Callable, inputs: list) -> Callable:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    with patched():
        return compile_by_itself(graph, inputs)
