# SPDX-License-Identifier: Apache-2.0
"""The fastest of the algorithms that cuBLASLt's heuristic lists for a large product.

The heuristic estimates, and published figures for NVFP4 suggest that its first answer costs 10 to
35% of the time of medium products. So the first large product of a class of shapes runs each listed
algorithm a few times. That launch waits for the device anyway, because it is compared with a BF16
GEMM (first_launch.py). The choice is stored for this GPU and these versions, so that every process
has the bits of the same algorithm.

The first algorithm stays

    under torch.use_deterministic_algorithms, and until a product runs outside of a capture;
    unless another takes less than 0.97 of its time, and agrees with it within rounding;
    if a process ended while it timed a class, since one of the algorithms may have been the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from q2compile.runtime_kernels import check_results
from q2compile.runtime_kernels.check_results import Request
from q2compile.runtime_kernels.cuda.gemm import cublaslt
from q2compile.runtime_kernels.cuda.gemm.cublaslt import Algorithm, GemmKind, Plan
from q2compile.runtime_kernels.cuda.gemm.first_launch import marked, request
from q2compile.runtime_kernels.kernel_states import LaunchError, lacks_memory
from q2compile.runtime_kernels.ops.table import GEMM
from q2compile.runtime_kernels.registry import CUBLASLT_FP4
from q2compile.runtime_kernels.selfcheck import GEMM_ERROR

LOG = logging.getLogger("q2compile")
_FASTER = 0.97  # of the first one's time; less is noise
_ROUNDS, _CALLS = 3, 2


def choose_algorithm(product: GemmKind, device: torch.device, arguments: tuple[Any, ...]) -> None:
    """Have a product run by its fastest algorithm from now on. arguments: those of `Plan.run`, the
    result last, which is overwritten."""
    first = cublaslt.planned(product)
    if first.is_chosen or torch.cuda.is_current_stream_capturing():
        return
    if len(first.algorithms) == 1 or torch.are_deterministic_algorithms_enabled():
        first.is_chosen = True
        return
    what = _class_of(product, device)
    if check_results.take_unended(what) is not None:
        LOG.warning("q2compile: a process ended in %s: the first one runs", what.label)
        check_results.remember(what, first.algorithms[0])
    known: Sequence[int] | None = check_results.remembered(what)
    if known is None:
        with marked(what):
            known = _fastest(product, first.algorithms, arguments)
        if known is None:
            return
        check_results.remember(what, known)
    cublaslt.plan(product, known)


def milliseconds(call: Callable[[], None]) -> float:
    """The time of a call on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_CALLS):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / _CALLS


def _class_of(product: GemmKind, device: torch.device) -> Request:
    """Products that share a choice: as many rows between two powers of two."""
    rows, others = product.rows.bit_length(), product[2:]
    return request(GEMM, CUBLASLT_FP4, device, "choice of an algorithm", rows, *others)


def _fastest(
    product: GemmKind, algorithms: list[Algorithm], arguments: tuple[Any, ...]
) -> Algorithm | None:
    """The fastest; None if this product does not tell, or if memory is missing."""
    try:
        good = _agreeing([Plan(product, each) for each in algorithms], arguments)
    except Exception as error:
        if lacks_memory(error):
            return None
        raise
    if not good:
        return None
    calls = {plan.algorithm: partial(plan.run, *arguments) for plan in good}
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(_ROUNDS):
        for each, call in calls.items():
            times[each] = min(times[each], milliseconds(call))
    best, first = min(times, key=times.__getitem__), algorithms[0]
    if times[best] > _FASTER * times[first]:
        return first
    LOG.info(
        "q2compile: %s: algorithm %d of the heuristic takes %.2f of the first one's time",
        *(product, algorithms.index(best) + 1, times[best] / times[first]),
    )
    return best


def _agreeing(plans: list[Plan], arguments: tuple[Any, ...]) -> list[Plan]:
    """The first plan, and those whose results agree with its; none if its result has no finite
    number other than 0."""
    out = arguments[-1]
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    plans[0].run(*arguments)
    want = out.clone()
    size = float(norm(want))
    if not 0 < size < float("inf"):
        return []
    good = plans[:1]
    for plan in plans[1:]:
        try:
            plan.run(*arguments)
        except LaunchError:  # listed, and not supported after all
            continue
        if float(norm(out - want)) <= 2 * GEMM_ERROR[out.dtype] * size:
            good.append(plan)
    return good
