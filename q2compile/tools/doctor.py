# SPDX-License-Identifier: Apache-2.0
"""Devices, versions, kernels and cubins of this machine, with a self-check of each kernel.

    q2compile doctor [--no-check] [--json]
    q2compile doctor --clear-cache

The self-check runs every kernel that serves the device, and the Inductor kernels of quantizers, on
small tiles. It compares results with the torch reference on the CPU: quantizers bit by bit, GEMMs
on a GPU to the rounding of the result. Every check runs anew. Those of a GPU run in a process of
their own with a time limit, and their results are kept for training. The exit status is 1 when a
kernel is rejected."""

import importlib.metadata
import json
import platform
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from q2compile.config import Config
from q2compile.lowering.inductor_kernels import selfcheck as inductor_selfcheck
from q2compile.runtime_kernels.cache_folder import cache_dir
from q2compile.runtime_kernels.cpu import build
from q2compile.runtime_kernels.cuda import checks, emulated, selfcheck
from q2compile.runtime_kernels.cuda.checked_cases import (
    CASES,
    FORMS_OF,
    arguments_of,
    checked_of,
    op_of,
)
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.cuda.versions import cublaslt_version, driver_version
from q2compile.runtime_kernels.kernel_states import REJECTED, state_of
from q2compile.runtime_kernels.ops.table import QUANTIZE, Variant, rowwise_call
from q2compile.runtime_kernels.registry import (
    CUDA,
    INDUCTOR,
    REFERENCE,
    Kernel,
    KernelWarning,
    kernels,
    ops,
)
from q2compile.tools.clear_cache import clear_cache

# The schemes of the recipes' operands for which Inductor kernels are used.
INDUCTOR_CHECKED: tuple[str, ...] = ("nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16_pow2")
INDUCTOR_CHECKED += ("nvfp4_16x16", "mxfp4_rceil_32x32")
_PACKAGES = ("triton", "cuda-bindings", "nvidia-cuda-nvrtc")
PASSED, SERVES = "passed", "serves"  # beside the three states of kernels that do not run


@dataclass
class Row:
    """The state of a kernel with one scheme; of a quantizer also for one variant.

    state: passed, rejected, unsupported or disabled; "serves" without a check.
    """

    op: str
    kernel: str
    of: str
    scheme: str
    state: str = SERVES
    reason: str = ""
    milliseconds: int | None = None
    asks: Any = field(default=None, repr=False)  # each: None, or the reason why it does not run
    begins: Any = field(default=None, repr=False)  # has its check run ahead

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.of if self.of != self.op else ''}".rstrip()

    def ask(self) -> None:
        """Fills in the state: rejected if one of its forms is, unsupported if all are."""
        start, reasons = time.perf_counter(), []
        for ask in self.asks:
            try:
                reasons.append(ask())
            except Exception as error:  # whatever a kernel does, the report goes on
                self.state, self.reason = REJECTED, f"{type(error).__name__}: {error}"
                return
        self.milliseconds = round(1e3 * (time.perf_counter() - start))
        bad = [r for r in reasons if r is not None and state_of(r) == REJECTED]
        if bad or None not in reasons:
            reason = (bad or reasons)[0]
            self.state = state_of(reason)
            self.reason = " ".join(reason.split()).removeprefix(f"{self.state}: ")
        else:
            self.state = PASSED

    def as_line(self) -> dict[str, Any]:
        """For JSON."""
        names = "op", "kernel", "of", "scheme", "state", "reason", "milliseconds"
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        if self.state == SERVES:
            return "serves this device"
        if self.state == PASSED:
            return f"passed ({self.milliseconds} ms)"
        state = f"FAULT, {self.state}" if self.state == REJECTED else self.state
        return f"{state}: {self.reason.removeprefix(f'{self.state} ')}"


def run(options: Namespace) -> int:
    """Prints the report. Returns the exit status: 0, or 1 when a kernel is at fault."""
    if options.clear_cache:
        print(f"cache     {clear_cache(cache_dir())}")
        return 0
    Config().disable()  # raises for names in the environment that no kernel has
    say: Callable[..., None] = _nothing if options.json else print
    start = time.perf_counter()
    report: dict[str, Any] = {"versions": _versions(say), "cache": _cache(say), "devices": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)  # the report says it
        if not torch.cuda.is_available():
            report["devices"].append(_cpu(not options.no_check, say))
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            report["devices"].append(_device(index, not options.no_check, say))
    report["seconds"] = round(time.perf_counter() - start, 1)
    lines = [line for device in report["devices"] for line in device["kernels"]]
    if lines and not options.no_check:
        say(f"checked   {len(lines)} kernels in {report['seconds']:.0f} s")
    if options.json:
        print(json.dumps(report, indent=1))
    return int(any(line["state"] == REJECTED for line in lines))


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _versions(say: Callable[..., None]) -> dict[str, str | None]:
    """The packages that kernels for a GPU need are asked for where there is one."""
    on_gpu = torch.cuda.is_available()
    # torch with its build, 2.15.0+cu132, which metadata may lack
    found: dict[str, str | None] = {"Python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES if on_gpu else ():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if on_gpu:
        found |= {"driver": driver_version(), "cuBLASLt": cublaslt_version()}
    words = (f"{name} {of}" if of else f"no {name}" for name, of in found.items())
    say(f"versions  {', '.join(words)}")
    if on_gpu:
        try:
            found["NVRTC"] = "{}.{}".format(*nvrtc.version())
            say(f"compiler  NVRTC {found['NVRTC']}")
        except ImportError as error:
            found["NVRTC"] = None
            say(f"compiler  none: {error}")
    return found


def _cache(say: Callable[..., None]) -> dict[str, Any]:
    cubins = list(cache_dir().glob("*.cubin"))
    size = sum(path.stat().st_size for path in cubins) / 1024
    say(f"cubins    {len(cubins)} in {cache_dir()}, {size:.0f} KiB")
    return {"folder": str(cache_dir()), "cubins": len(cubins), "kib": round(size)}


def _cpu(check: bool, say: Callable[..., None]) -> dict[str, Any]:
    """Prints this processor and its kernels."""
    missing = build.why_missing()
    vectors = torch.backends.cpu.get_cpu_capability()
    target = f"no kernels: {missing}" if missing else f"kernels in C++ for {vectors}"
    say(f"device    cpu, none with CUDA; {target}; the rest runs as its torch reference")
    rows = [] if missing else list(device_rows(torch.device("cpu")))
    checked(rows, check, say)
    return {"device": "cpu", "name": vectors, "kernels": [row.as_line() for row in rows]}


def _device(index: int, check: bool, say: Callable[..., None]) -> dict[str, Any]:
    """Prints a device and its kernels, each before it is checked."""
    major, minor = torch.cuda.get_device_capability(index)
    reason = launch.unsupported(index)
    target = f"no kernels: {reason}" if reason else f"kernels for {launch.architecture(index)}"
    name = torch.cuda.get_device_name(index)
    say(f"device    cuda:{index} {name}, {major}.{minor}, {target}")
    stated = emulated.of_device(index)
    for text in stated:
        say(f"emulated  {text}")
    rows = list(device_rows(torch.device("cuda", index)))
    checked(rows, check, say)
    return {
        "index": index,
        "name": name,
        "capability": f"{major}.{minor}",
        "target": target,
        "emulated": stated,
        "kernels": [row.as_line() for row in rows],
    }


def checked(rows: list[Row], check: bool, say: Callable[..., None]) -> None:
    """Fills in the rows, and prints each: what it is of before its check runs."""
    with checks.answering(checks.Mode(stored=False, runs=False)):
        for row in rows:
            row.ask()
            if row.state == PASSED:
                row.state = SERVES
    with checks.answering(checks.Mode(stored=False)) if check else nullcontext():
        to_check = [row for row in rows if check and row.state == SERVES]
        for row in to_check:
            for begin in row.begins:
                begin()
        last = ""
        names = max((len(row.name) for row in rows), default=0)
        schemes = max((len(row.scheme) for row in rows), default=0)
        for row in rows:
            if row.op != last:
                last = row.op
                say(f"  {last}")
            say(f"    {row.name:{names}}  {row.scheme:{schemes}}  ", end="", flush=True)
            if check and row.state == SERVES:
                row.ask()
            say(row)


def device_rows(device: torch.device) -> Iterator[Row]:
    """Rows of Inductor kernels on a GPU, and of all kernels but the references."""
    if device.type == "cuda":
        yield from inductor_rows(device)
    for op in ops():
        for kernel in kernels(op):
            serves = kernel.name != REFERENCE and kernel.device_type in (None, device.type)
            for of, scheme in checked_of(op) if serves else ():
                yield kernel_row(kernel, device, of, scheme)


def inductor_rows(device: torch.device) -> Iterator[Row]:
    for scheme in INDUCTOR_CHECKED:
        yield Row(
            *(QUANTIZE, INDUCTOR, f"Inductor kernel of {QUANTIZE}", scheme),
            asks=[partial(inductor_selfcheck.rejection, device, rowwise_call(scheme))],
            begins=[partial(inductor_selfcheck.begin, device, scheme)],
        )


def kernel_row(kernel: Kernel, device: torch.device, of: str | Variant, scheme: str) -> Row:
    """The rows of a kernel with one scheme; of a GEMM in all its variants."""
    op = op_of(of)
    forms = FORMS_OF.get(op, ())
    calls = [next(CASES[op](scheme, (f,))).arguments for f in forms] or [arguments_of(of, scheme)]

    def ask(arguments: tuple) -> str | None:
        on_device = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        return kernel.why_not(*on_device)

    begins: list[Callable[[], None]] = []
    if kernel.name == CUDA and kernel.launching is not None and not forms:
        begins = [partial(selfcheck.begin, of, device.index, scheme)]
    for form in forms if device.type == "cuda" else ():
        what = op, kernel.name, device.index, scheme, form
        begins.append(partial(selfcheck.begin_gemm, *what))
    asks = [partial(ask, arguments) for arguments in calls]
    return Row(op, kernel.name, str(of), scheme, asks=asks, begins=begins)
