# SPDX-License-Identifier: Apache-2.0
"""The form of a call, by which its kernel is checked, and the small calls of that form."""

from __future__ import annotations

import pickle
from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from q2compile.runtime_kernels.numerics.schemes import DEQUANTIZED, SCHEMES, SWIZZLED, get_scheme
from q2compile.runtime_kernels.small_calls import form_of, small_calls, stands_for
from tests.support.checked_forms import (
    BOTH,
    REQUANTIZED,
    ROWWISE,
    TYPES,
    checked_of,
    form,
    products,
)

FORMS = [form(of, scheme) for of, scheme in checked_of()]
FORMS += [
    each
    for op, name in product(("gemm", "gemm_masked_unrotate", "grouped_gemm"), ("nvfp4", "mxfp4"))
    for each in products(op, {"nvfp4": "nvfp4_46_pow2", "mxfp4": "mxfp4_rtn"}[name])
]
FORMS += [
    form(ROWWISE, "nvfp4_46", x=dtype, aligned=aligned)
    for dtype, aligned in product(TYPES, (True, False))
]
FORMS += [
    form(REQUANTIZED._replace(by_scales=True), "nvfp4_sr_pow2", aligned=False),
    form("gemm", "nvfp4_46_pow2", a_scheme="nvfp4_46_pow2" + SWIZZLED, b_global=None),
    form("gemm", "nvfp4_46_pow2", a_scheme="nvfp4_46_pow2" + DEQUANTIZED),
]


def test_small_calls_have_the_form_that_was_asked_for() -> None:
    """Otherwise another kernel would be checked than the one that runs."""
    for asked in dict.fromkeys(FORMS):
        found = {form_of(asked.op, call.args) for call in small_calls(asked)}
        if asked.op == "dequantize":  # it is not known whether all columns are wanted
            asked = {form("dequantize", asked.args[3], cols=cols) for cols in (True, False)}
            assert found == asked
        else:
            assert found == {asked}
        assert pickle.loads(pickle.dumps(found)) == found  # as it goes to the child process


def test_sizes_are_no_part_of_a_form() -> None:
    """Nor are values and names of schemes that a kernel does not tell apart."""
    asked = form(BOTH, "nvfp4_ms_eden_pow2")
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False) as mode:
        for shape in ((8, 64), (4096, 8192)):
            x = mode.from_tensor(torch.empty(shape, dtype=torch.bfloat16))
            seed = torch.empty((), dtype=torch.int64)
            named = asked.named | {"x": x, "rowwise_seed": seed, "columnwise_seed": seed}
            assert form_of("quantize", tuple(named.values())) == asked
    assert form("gemm", "nvfp4_pow2") == form("gemm", "nvfp4_46_pow2")
    assert form("gemm", "nvfp4") != form("gemm", "nvfp4_46_pow2")


@pytest.mark.parametrize("end", ["", SWIZZLED, DEQUANTIZED])
def test_a_scheme_stands_for_those_that_gemms_read_alike(end) -> None:
    """It draws no random numbers, so that an operand in it can be made without a seed."""
    names = [name for name, scheme in SCHEMES.items() if not scheme.is_tensorwise]
    names = [name for name in names if end != SWIZZLED or SCHEMES[name].block[0] == 1]
    for name in names:
        of, spec = get_scheme(stands_for(name + end)), get_scheme(name + end)
        assert not of.stochastic and of.form == spec.form
        assert (of.format, of.block) == (spec.format, spec.block)
        assert of.has_pow2_scale == spec.has_pow2_scale
    assert len({stands_for(name) for name in names}) == (7 if end != SWIZZLED else 4)
