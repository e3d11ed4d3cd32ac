# SPDX-License-Identifier: Apache-2.0
"""Faults to plant (planted_faults.py) in how kernels are launched: the order of launches that may
begin early."""

from __future__ import annotations

from tests.support.fault import fault

_CUDA = "runtime_kernels/cuda"  # in the packages and in tests/
_ORDER = f"{_CUDA}/test_ptx_order.py"

OF_LAUNCHES = (
    # ---- programmatic dependent launch ----
    fault(
        "no kernel waits for the one ahead of it",
        f"{_CUDA}/csrc/include/ptx.cuh",
        '"griddepcontrol.wait;"',
        '""',
        _ORDER,
    ),
    fault(
        "a quantizer begins while its operand may still be written",
        f"{_CUDA}/quantize/plan.py",
        "        return (rotate(),)\n",
        "        return (rotate(overlaps=True),)\n",
        _ORDER,
    ),
    fault(
        "a quantizer with a tail kernel begins early, and never waits",
        f"{_CUDA}/quantize/plan.py",
        "        return rotate(), align_launch(",
        "        return rotate(overlaps=True), align_launch(",
        _ORDER,
    ),
    fault(
        "the first kernel of split_scales begins early",
        f"{_CUDA}/quantize/split_scales.py",
        '"PPq", _THREADS, defines={})',
        '"PPq", _THREADS, overlaps=True, defines={})',
        _ORDER,
    ),
    fault(
        "the second pass of an exact scale reads maxima before it waits",
        f"{_CUDA}/csrc/rotate_quantize.cu",
        """\
  if (kRule == EXACT) await_previous_kernel();  // AMAX, which left its results in `largest`
  Common rows = {}, cols = {};
  if (kRows) rows = common_of(p, p.of[0].rowwise, Q2_ROTATES_ROWS ? p.norm : 1.0f);
""",
        """\
  Common rows = {}, cols = {};
  if (kRows) rows = common_of(p, p.of[0].rowwise, Q2_ROTATES_ROWS ? p.norm : 1.0f);
  if (kRule == EXACT) await_previous_kernel();  // AMAX, which left its results in `largest`
""",
        _ORDER,
    ),
    fault(
        "the second pass of an exact scale never waits",
        f"{_CUDA}/csrc/rotate_quantize.cu",
        "  if (kRule == EXACT) await_previous_kernel();",
        "  if (kRule == AMAX) await_previous_kernel();",
        _ORDER,
    ),
    fault(
        "scales are aligned to a maximum that is read too early",
        f"{_CUDA}/csrc/align_scales.cu",
        """\
  await_previous_kernel();  // nothing of rotate_quantize.cu has been read up to here
  float factor = factor_of(operand), global_scale = global_scale_of(operand, factor);
""",
        """\
  float factor = factor_of(operand), global_scale = global_scale_of(operand, factor);
  await_previous_kernel();
""",
        _ORDER,
    ),
    fault(
        "only the first thread of a tail kernel waits",
        f"{_CUDA}/csrc/align_scales.cu",
        "  await_previous_kernel();  // nothing",
        "  if (threadIdx.x == 0) await_previous_kernel();  // nothing",
        _ORDER,
    ),
    fault(
        "column sums are added up before all tiles have theirs",
        f"{_CUDA}/csrc/finalize_dequantized.cu",
        "    await_previous_kernel();\n    add_up",
        "    add_up",
        _ORDER,
    ),
    fault(
        "the blocks that are rescaled are chosen before all scales are there",
        f"{_CUDA}/csrc/finalize_dequantized.cu",
        "\n  await_previous_kernel();\n  float factor",
        "\n  float factor",
        _ORDER,
    ),
)
