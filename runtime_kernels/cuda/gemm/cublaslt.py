# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt's products of scaled operands, called by ctypes: A B^T * alpha + bias, rounded once.

torch.nn.functional.scaled_mm calls the same function. This file differs in the following (read in
torch 2.11 to 2.15, ATen/native/cuda/ScaledBlas.cpp and ATen/cuda/CUDABlas.cpp):

    alpha      torch up to 2.13 copies it into one buffer for the whole process, on the first GPU
               that used it; two streams may write and read it at once. Here cuBLASLt reads alpha
               in place: in memory of this call's stream, which the caching allocator does not
               reuse on that stream before the product has run.
    look-up    torch asks cuBLASLt's heuristic for an algorithm, and makes and frees seven
               descriptors, at every call. Here once for each kind of product.
    algorithm  torch takes the first; here the fastest of the first eight runs (fastest.py).
    bias       torch does not support one for an fp32 result.

cuBLASLt adds the bias after alpha has scaled the sums. Its matrices are column-major: ours is the
transpose of one, so its A is our b, its columns are our rows.

The constants are those of cublasLt.h and library_types.h of CUDA 12.8 to 13.1, and of cuBLAS 13.10:
tests/runtime_kernels/cuda/test_cublaslt_header.py compares them with an installed cublasLt.h.
"""

import ctypes
import functools
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from q2compile.runtime_kernels.cuda.gemm.operands import ALIGNMENT
from q2compile.runtime_kernels.cuda.jit.launch import LaunchError, empty
from q2compile.runtime_kernels.cuda.recent_launches import note
from q2compile.runtime_kernels.ops.table import GEMM
from q2compile.runtime_kernels.registry import CUBLASLT_FP4
from q2compile.runtime_kernels.versions import cublaslt as library

_COMPUTE_32F, _TRANSPOSE, _POINTERS_ON_DEVICE, _EPILOGUE_BIAS = 68, 1, 1, 4
_POINTER_MODE, _TRANSA, _EPILOGUE, _BIAS_POINTER, _BIAS_TYPE = 2, 3, 7, 8, 26
_A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 17, 18, 31, 32
_WORKSPACE_BYTES, _ALIGNMENTS = 1, (5, 6, 7, 8)  # of a preference
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
E2M1, E4M3 = 33, 28
SCALES_ARE_ONE_FP32, SCALES_OF_16 = 0, 1
_MOST_WORKSPACE = 32 << 20
_ASKED = 8  # algorithms that the heuristic is asked for
_MOST_PLANS = 4096  # for a program whose shapes never repeat


Operand = tuple[torch.Tensor, torch.Tensor]  # codes, scales


class GemmKind(NamedTuple):
    """A kind of product: a [rows, k] times b [columns, k], transposed, on a CUDA device.

    operand and scale_mode: cuBLASLt's constants for the type of both, and for the layout of their
        scales.
    """

    device: int
    rows: int
    columns: int
    k: int
    dtype: torch.dtype
    bias: torch.dtype | None
    operand: int = E2M1
    scale_mode: int = SCALES_OF_16


class Algorithm(NamedTuple):
    """Identifies an algorithm of cuBLASLt: cublasLtMatmulAlgoConfigAttributes_t, in order.

    An attribute that this version of cuBLASLt does not have is -1.
    """

    id: int
    tile: int
    split_k: int
    reduction: int
    swizzling: int
    option: int
    stages: int
    inner_shape: int
    cluster_shape: int


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class Descriptors:
    """The descriptors of a product: an operation, three layouts, a preference. Making them needs no
    device."""

    def __init__(self, product: GemmKind) -> None:
        p = product
        self._made: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _destroy, library(), self._made).atexit = False
        self.operation = self._make("MatmulDesc", _COMPUTE_32F, 0)
        for attribute, value in (
            (_TRANSA, _TRANSPOSE),
            (_POINTER_MODE, _POINTERS_ON_DEVICE),
            (_A_SCALE_MODE, p.scale_mode),
            (_B_SCALE_MODE, p.scale_mode),
        ):
            self.set(attribute, ctypes.c_int32(value))
        # In the look-up of an algorithm cuBLASLt reads only the alignment of these.
        for attribute in (_A_SCALE, _B_SCALE, *((_BIAS_POINTER,) if p.bias else ())):
            self.set(attribute, ctypes.c_void_p(1 << 20))
        if p.bias is not None:
            self.set(_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
            self.set(_BIAS_TYPE, ctypes.c_int32(_TYPES[p.bias]))
        layout = functools.partial(self._make, "MatrixLayout")
        wide = ctypes.c_uint64
        self.a = layout(p.operand, wide(p.k), wide(p.columns), ctypes.c_int64(p.k))
        self.b = layout(p.operand, wide(p.k), wide(p.rows), ctypes.c_int64(p.k))
        sizes = wide(p.columns), wide(p.rows), ctypes.c_int64(p.columns)
        self.result = layout(_TYPES[p.dtype], *sizes)
        self.preference = self._make("MatmulPreference")
        for attribute, number in (
            (_WORKSPACE_BYTES, ctypes.c_uint64(_MOST_WORKSPACE)),
            *((which, ctypes.c_uint32(ALIGNMENT)) for which in _ALIGNMENTS),
        ):
            self._set("MatmulPreference", self.preference, attribute, number)

    def set(self, attribute: int, value) -> None:
        """Set an attribute of the operation."""
        self._set("MatmulDesc", self.operation, attribute, value)

    def _set(self, kind: str, of: ctypes.c_void_p, attribute: int, value) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _call(f"{kind}SetAttribute", of, attribute, ctypes.byref(value), size)

    def _make(self, kind: str, *args) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        _call(f"{kind}Create", ctypes.byref(made), *args)
        self._made.append((kind, made))
        return made


def _destroy(by: ctypes.CDLL, descriptors: list[tuple[str, ctypes.c_void_p]]) -> None:
    for kind, made in descriptors:
        getattr(by, f"cublasLt{kind}Destroy")(made)


class Plan:
    """A product, with one of the algorithms that cuBLASLt's heuristic lists for it.

    algorithms: all of them, in its order
    algorithm: the one that runs: `wanted` if it is listed, else the first
    is_chosen: whether no other is to be tried (fastest.py)

    Raises:
        LaunchError: cuBLASLt has none.
    """

    def __init__(self, product: GemmKind, wanted: Sequence[int] | None = None) -> None:
        self._product, self._parts = product, Descriptors(product)
        self._handle, self._zero = handle(product.device)
        self.is_chosen = wanted is not None
        self._lock = threading.Lock()  # the pointers are in the descriptor; ctypes lets others run
        usable = self._looked_up()
        self.algorithms = [_described(one) for one in usable]
        listed = wanted is not None and tuple(wanted) in self.algorithms
        which = self.algorithms.index(Algorithm(*wanted)) if wanted and listed else 0
        self.algorithm, self._found = self.algorithms[which], usable[which]

    def _looked_up(self) -> list[_Heuristic]:
        found, count = (_Heuristic * _ASKED)(), ctypes.c_int()
        p, product = self._parts, self._product
        try:
            _call(
                "MatmulAlgoGetHeuristic",
                *(self._handle, p.operation, p.a, p.b, p.result, p.result, p.preference),
                *(_ASKED, found, ctypes.byref(count)),
            )
        except LaunchError as error:
            if not torch.cuda.is_current_stream_capturing():
                raise
            raise LaunchError(  # of CUDA 13.3: INTERNAL_ERROR
                f"cuBLASLt is asked for an algorithm for [{product.rows}, {product.k}] times "
                f"[{product.k}, {product.columns}] for the first time inside a CUDA graph capture, "
                f"where it gives none ({error}): run the model once with these sizes before "
                "capturing it."
            ) from error
        usable = [one for one in found[: count.value] if not one.state]
        if not usable:
            raise LaunchError(f"cuBLASLt has no algorithm for {product}: status {found[0].state}.")
        return usable

    def run(self, a: Operand, b: Operand, alpha, bias, out) -> None:
        p, at = self._parts, address
        size = self._found.workspace
        workspace = empty((size,), (1,), torch.uint8) if size else None
        with self._lock:
            p.set(_A_SCALE, at(b[1]))
            p.set(_B_SCALE, at(a[1]))
            if bias is not None:
                p.set(_BIAS_POINTER, at(bias))
            _call(
                "Matmul",
                *(self._handle, p.operation, at(alpha)),
                *(at(b[0]), p.a, at(a[0]), p.b, self._zero),
                *(at(out), p.result, at(out), p.result, ctypes.byref(self._found)),
                *(at(workspace), ctypes.c_size_t(size)),
                ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self._product.device)),
            )


def _described(found: _Heuristic) -> Algorithm:
    values = []
    for attribute in range(len(Algorithm._fields)):
        # The last two are of 16 bits.
        value = ctypes.c_int32() if attribute < 7 else ctypes.c_int16()
        status = library().cublasLtMatmulAlgoConfigGetAttribute(
            *(ctypes.byref(found), attribute, ctypes.byref(value)),
            *(ctypes.c_size_t(ctypes.sizeof(value)), ctypes.byref(ctypes.c_size_t())),
        )
        values.append(-1 if status else value.value)
    return Algorithm(*values)


def address(x: torch.Tensor | None) -> ctypes.c_void_p:
    """The address of a tensor as an argument of cuBLASLt; NULL for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())


PLANS: dict[GemmKind, Plan] = {}


def run(product: GemmKind, a: Operand, b: Operand, alpha, bias, out) -> None:
    """Enqueues a product on torch's current stream; its device is the current one.

    a, b: codes in rows, and scales in the order that cuBLASLt reads; all contiguous and aligned.
    alpha: one fp32.  bias: [columns], or None where the product has none.  out: [rows, columns].

    Raises:
        LaunchError: cuBLASLt is not there, or has no algorithm for this, or fails.
    """
    note(f"q2::{GEMM} by {CUBLASLT_FP4}")
    planned(product).run(a, b, alpha, bias, out)


def planned(product: GemmKind) -> Plan:
    """The plan that a product runs by.

    Raises:
        LaunchError: as `run`.
    """
    return PLANS.get(product) or plan(product)


def plan(product: GemmKind, wanted: Sequence[int] | None = None) -> Plan:
    """Chooses the algorithm that a product runs by from now on.

    wanted: None for the first that the heuristic lists; another is taken if it is listed.

    Raises:
        LaunchError: as `run`.
    """
    found = Plan(product, wanted)
    if len(PLANS) >= _MOST_PLANS:
        PLANS.clear()
    PLANS[product] = found
    return found


def _call(function: str, *args) -> None:
    status = getattr(library(), f"cublasLt{function}")(*args)
    if status:
        raise LaunchError(f"cublasLt{function}: {_STATUS.get(status, 'status')} ({status})")


_STATUS = {
    1: "NOT_INITIALIZED",
    3: "ALLOC_FAILED",
    7: "INVALID_VALUE",
    8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR",
    13: "EXECUTION_FAILED",
    14: "INTERNAL_ERROR",
    15: "NOT_SUPPORTED",
}


@functools.cache
def handle(index: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """cuBLASLt's handle for CUDA device `index`, the current one, and the address of a zero there.
    Both stay for good."""
    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "cuBLASLt is used for the first time inside a CUDA graph capture, where it cannot be "
            "loaded: run the model once before capturing it."
        )
    from cuda.bindings import driver

    torch.cuda.synchronize(index)  # gives this thread its context
    made = ctypes.c_void_p()
    _call("Create", ctypes.byref(made))
    # A tensor would be in the memory pool of a CUDA graph, if this is its warm-up.
    status, zero = driver.cuMemAlloc(4)
    if not int(status):
        (status,) = driver.cuMemsetD32(zero, 0, 1)
    if int(status):
        raise LaunchError(f"no memory for a zero, which cuBLASLt reads: {status.name}")
    torch.cuda.synchronize(index)  # other streams will read it
    return made, ctypes.c_void_p(int(zero))
