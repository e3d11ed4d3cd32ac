"""The loops that Inductor makes of a quantising op, compared with the torch reference before their
first use on GPUs that this project could not be tested on.

The rules are checked by tests; what stands between them and a new GPU are Inductor, Triton and
ptxas. So a small graph is compiled for the device, a product with one half and the quantiser that
fuses with it, and its codes and scales must be the reference's bits. That costs a small compilation
for each scheme of a recipe's forward, once: that loops agree is kept on disk, by device, versions
and sources, beside the cubins. A disagreement is not, and is found again in the next process.

It is compiled in a thread of its own, since Inductor keeps what it is at work on by thread.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from q2compile.lowering import register
from q2compile.runtime_kernels import numerics
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.selfcheck import apart, difference_of_bits, judge, proven
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.registry import LOOPS

_SHAPE = (130, 264)
_VERDICTS: dict[tuple, str | None] = {}  # None also while a check is under way


def refusal(
    op: str, device: torch.device, scheme: str, transform: str = "none", transpose: bool = False
) -> str | None:
    """None when the loops of an op may be used with a scheme on this device, otherwise the reason
    in words."""
    if _known(device):
        return None
    check = (op, device, scheme, transform, transpose)
    if check not in _VERDICTS:
        _VERDICTS[check] = None
        try:
            judge(_VERDICTS, check, (op, LOOPS, device), functools.partial(_checked, *check))
        except Exception:
            if _VERDICTS[check] is None:
                del _VERDICTS[check]
            raise
    return _VERDICTS[check]


def is_refused(op: str, device: torch.device, scheme: str, transform: str = "none") -> bool:
    """Whether a check that was run has refused them."""
    return any(
        reason is not None and check[:4] == (op, device, scheme, transform)
        for check, reason in _VERDICTS.items()
    )


def _known(device: torch.device) -> bool:
    return device.type != "cuda" or proven(device.index)


def _checked(
    op: str, device: torch.device, scheme: str, transform: str, transpose: bool
) -> str | None:
    mark = _mark(device, op, scheme, transform, transpose)
    if mark.exists():
        return None
    reason = disagreement(op, device, scheme, transform, transpose)
    if reason is not None:
        return reason
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError:
        pass  # it is checked again in the next process
    return None


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
    """The function as Inductor compiles it, without passes, caches and graphs of the caller's."""
    from torch._inductor import compile as compile_graph
    from torch._inductor import list_options

    own = {
        "fx_graph_cache": False,
        "cpp_wrapper": False,
        "max_autotune": False,
        "max_autotune_pointwise": False,
        "coordinate_descent_tuning": False,
        "triton.cudagraphs": False,
    }
    passes = [name for name in list_options() if name.endswith("_pass") and "custom" in name]
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    return compile_graph(graph, inputs, options={**own, **dict.fromkeys(passes)})


def _mark(device: torch.device, *check) -> Path:
    """The empty file that says that this check was passed on a device like this one."""
    key = hashlib.sha256()
    for part in (*_named(device), *check, *_versions(), _sources()):
        key.update(f"{part}\0".encode())
    return nvrtc.cache_dir() / f"{check[0]}-loops-{key.hexdigest()[:24]}.checked"


def _named(device: torch.device) -> tuple[str, int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.name, properties.major, properties.minor


def _versions() -> tuple[str, str]:
    import triton

    return torch.__version__, triton.__version__


@functools.cache
def _sources() -> str:
    """A hash of what the loops and their rules are written in."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(numerics.__file__).parent):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
