# SPDX-License-Identifier: Apache-2.0
"""What this machine can run: devices, versions, kernels, cubins, and a self-check of each kernel.

    q2compile doctor [--no-check]
    q2compile doctor --clear-cache

The self-check sends small tiles through every CUDA kernel that serves the device, and through the
loops that Inductor makes of quantizers, and compares them with the torch reference on the CPU:
quantizers bit by bit, GEMMs to the rounding of the result. The exit status is 1 when one disagrees
or fails to run.
"""

import argparse
import importlib.metadata
import platform
import time
import warnings

import torch

from q2compile.lowering import selfcheck as loops
from q2compile.runtime_kernels.cuda import selfcheck
from q2compile.runtime_kernels.cuda.checked_cases import arguments_of, checked_of
from q2compile.runtime_kernels.cuda.jit import launch, nvrtc
from q2compile.runtime_kernels.ops.table import Variant, rowwise_call
from q2compile.runtime_kernels.registry import (
    FAILED,
    LOOPS,
    REFERENCE,
    Kernel,
    KernelWarning,
    kernels,
    ops,
)
from q2compile.tools.clear_cache import clear_cache

# The schemes of the recipes' operands that Inductor's loops are taken for.
LOOPS_CHECKED = ("nvfp4_46_pow2", "nvfp4_46", "nvfp4_16x16_pow2", "nvfp4_16x16")
_PACKAGES = ("triton", "cuda-bindings", "nvidia-cuda-nvrtc")


def main(argv: list[str] | None = None) -> int:
    """Prints the report.

    Args:
        argv: arguments of the command, without its name; None for those of the process.

    Returns:
        The exit status: 0, or 1 when a kernel is at fault.
    """
    description = "What this machine can run."  # python -OO has no __doc__
    parser = argparse.ArgumentParser(prog="q2compile doctor", description=description)
    parser.add_argument("--no-check", action="store_true", help="list the kernels, run none")
    parser.add_argument(
        "--clear-cache",
        action="store_true",
        help="delete compiled kernels, passed self-checks and bench's choices of GEMMs, and end",
    )
    options = parser.parse_args(argv)
    if options.clear_cache:
        print(f"cache     {clear_cache(nvrtc.cache_dir())}")
        return 0
    on_gpu = torch.cuda.is_available()
    _print_versions(on_gpu)
    _print_cache()
    if not on_gpu:
        print("device    none with CUDA: every op runs as its torch reference")
        return 0
    faults = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", KernelWarning)  # the report says it
        for index in range(torch.cuda.device_count()):
            faults += _device(index, check=not options.no_check)
    return 1 if faults else 0


def _print_versions(on_gpu: bool) -> None:
    """The packages that kernels for a GPU need are asked for where there is one."""
    found = [f"torch {torch.__version__}"]  # with its build, 2.15.0+cu132, which metadata may lack
    for package in _PACKAGES if on_gpu else ():
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {package}")
    print(f"versions  Python {platform.python_version()}, {', '.join(found)}")
    if not on_gpu:
        return
    try:
        major, minor = nvrtc.version()
        print(f"compiler  NVRTC {major}.{minor}, for {', '.join(nvrtc.ARCHITECTURES.values())}")
    except ImportError as error:
        print(f"compiler  none: {error}")


def _print_cache() -> None:
    cubins = list(nvrtc.cache_dir().glob("*.cubin"))
    size = sum(path.stat().st_size for path in cubins) / 1024
    print(f"cubins    {len(cubins)} in {nvrtc.cache_dir()}, {size:.0f} KiB")


def _device(index: int, *, check: bool) -> int:
    """Prints a device and its kernels; the number of faulty ones."""
    major, minor = torch.cuda.get_device_capability(index)
    reason = launch.unsupported(index)
    target = f"no kernels: {reason}" if reason else f"kernels for {launch.architecture(index)}"
    print(f"device    cuda:{index} {torch.cuda.get_device_name(index)}, {major}.{minor}, {target}")
    print(f"  {'loops of quantize':18} {LOOPS}")
    faults = _loops(torch.device("cuda", index), check)
    for op in ops():
        names = [k.name for k in kernels(op)]
        print(f"  {op:18} {', '.join(names)}")
        for kernel in kernels(op):
            if kernel.name != REFERENCE:
                faults += _kernel(kernel, torch.device("cuda", index), check)
    return faults


def _kernel(kernel: Kernel, device: torch.device, check: bool) -> int:
    """Prints what is to be said of a kernel on a device; 1 when it is at fault."""
    faults = 0
    for of, scheme in checked_of(kernel.op):
        verdict, fault = _with_scheme(kernel, device, check, of, scheme)
        name = f"{kernel.name} {of if isinstance(of, Variant) else ''}".rstrip()
        print(f"    {name:40} {scheme:20} {verdict}")
        faults |= fault
    return faults


def _loops(device: torch.device, check: bool) -> int:
    """Prints what is to be said of Inductor's loops on a device; the number of faulty ones."""
    faults = 0
    for scheme in LOOPS_CHECKED:
        difference, start = None, time.perf_counter()
        try:
            if check:
                difference = loops.disagreement(device, rowwise_call(scheme))
        except Exception as error:  # whatever Inductor does, the report goes on
            difference = _on_one_line(f"{type(error).__name__}: {error}")
        print(f"    {LOOPS:16} {scheme:20} {_verdict(difference, check, start)}")
        faults += difference is not None
    return faults


def _with_scheme(
    kernel: Kernel, device: torch.device, check: bool, of: str | Variant, scheme: str
) -> tuple[str, int]:
    """A verdict on a kernel with one scheme, of a quantizer for a variant; and 1 when it is at
    fault."""
    arguments = arguments_of(of, scheme)
    start = time.perf_counter()
    try:
        on_device = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
        reason = kernel.why_not(*on_device)
        if reason is not None:
            return f"not here: {_on_one_line(reason)}", int(reason.startswith(FAILED))
        if not check:
            return _verdict(None, check, start), 0
        variant = (of,) if isinstance(of, Variant) else ()
        difference = selfcheck.disagreement(kernel.op, kernel.name, device, scheme, *variant)
    except Exception as error:  # whatever a kernel does, the report goes on
        difference = _on_one_line(f"{type(error).__name__}: {error}")
    return _verdict(difference, check, start), int(difference is not None)


def _verdict(difference: str | None, check: bool, start: float) -> str:
    if not check:
        return "serves this device"
    took = 1e3 * (time.perf_counter() - start)
    verdict = "agrees with the reference" if difference is None else f"FAULT: {difference}"
    return f"{verdict} ({took:.0f} ms)"


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    raise SystemExit(main())
