# SPDX-License-Identifier: Apache-2.0
"""Faults to plant (planted_faults.py) in how kernels are launched: the order of launches that may
begin early."""

from __future__ import annotations

from tests.support.fault import fault

_CUDA = "runtime_kernels/cuda"  # in the packages and in tests/
_ORDER = f"{_CUDA}/test_ptx_order.py"
_CUBLASLT, _RULES = f"{_CUDA}/gemm/cublaslt.py", f"{_CUDA}/test_cublaslt_rules.py"

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
        "        return (rotate_launch(kernel),)\n",
        "        return (rotate_launch(kernel, overlaps=True),)\n",
        _ORDER,
    ),
    fault(
        "a quantizer with a tail kernel begins early, and never waits",
        f"{_CUDA}/quantize/plan.py",
        "        return rotate_launch(kernel), tail",
        "        return rotate_launch(kernel, overlaps=True), tail",
        _ORDER,
    ),
    fault(
        "codes of fp8 are made before the largest element is known",
        f"{_CUDA}/csrc/transposable.cu",
        "    await_previous_kernel();\n",
        "",
        f"{_CUDA}/test_transposable.py",
    ),
    fault(
        "a quantizer of fp8 that is given an amax begins early, and never waits",
        f"{_CUDA}/quantize/transposable.py",
        "overlaps=follows",
        "overlaps=True",
        f"{_CUDA}/test_transposable.py",
    ),
    fault(
        "the first kernel of split_scales begins early",
        f"{_CUDA}/other_ops.py",
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
        f"{_CUDA}/csrc/include/scales.cuh",
        "  await_previous_kernel();\n  add_up",
        "  add_up",
        _ORDER,
    ),
    fault(
        "the blocks that are rescaled are chosen before all scales are there",
        f"{_CUDA}/csrc/finalize_dequantized.cu",
        "\n  await_previous_kernel();\n  float factor",
        "\n  float factor",
        _ORDER,
    ),
    # ---- cuBLASLt ----
    fault(
        "the scales of the two operands change places",
        _CUBLASLT,
        "p.set(_A_SCALE, at(b[1]))\n            p.set(_B_SCALE, at(a[1]))",
        "p.set(_A_SCALE, at(a[1]))\n            p.set(_B_SCALE, at(b[1]))",
        _RULES,
    ),
    fault(
        "cuBLASLt reads alpha and beta on the host",
        _CUBLASLT,
        "(_POINTER_MODE, _POINTERS_ON_DEVICE),",
        "(_POINTER_MODE, 0),",
        _RULES,
    ),
    fault(
        "an algorithm is run without its workspace",
        _CUBLASLT,
        "size = self._found.workspace",
        "size = 0",
        _RULES,
    ),
    fault(
        "a look-up in a capture fails without saying what to do",
        _CUBLASLT,
        "            if not torch.cuda.is_current_stream_capturing():\n                raise\n",
        "            raise\n",
        _RULES,
    ),
    fault(
        "columns are padded to 4, and rows of codes to 4 bytes",
        f"{_CUDA}/gemm/cublaslt_fp4.py",
        "_UNIT = 16  #",
        "_UNIT = 4  #",
        _RULES,
    ),
    fault(
        "swizzled scales may begin anywhere",
        f"{_CUDA}/gemm/swizzle.py",
        "return aligned(factor.scales.flatten())",
        "return factor.scales.flatten()",
        _RULES,
    ),
    fault(
        "a bias may begin anywhere",
        f"{_CUDA}/gemm/cublaslt_fp4.py",
        "aligned(pad(bias, (0, missing)) if missing else bias.contiguous())",
        "(pad(bias, (0, missing)) if missing else bias.contiguous())",
        _RULES,
    ),
)
