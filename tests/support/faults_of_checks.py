# SPDX-License-Identifier: Apache-2.0
"""Faults to plant (planted_faults.py) in what protects a first run on a GPU: self-checks, the
comparison of large GEMMs, targets of compilation, and what is said when the device fails."""

from __future__ import annotations

from tests.support.fault import fault

_CUDA = "runtime_kernels/cuda"  # in the packages and in tests/

OF_CHECKS = (
    # ---- self-checks ----
    fault(
        "thread blocks with several tiles are not checked",
        "runtime_kernels/selfcheck.py",
        "    found = difference()\n    if found is None:\n",
        "    found = difference()\n    if False:\n",
        f"{_CUDA}/test_what_runs_is_checked.py",
    ),
    fault(
        "the tile of large products is not checked",
        "runtime_kernels/selfcheck.py",
        "with on_one_multiprocessor() if in_training else nullcontext():",
        "with nullcontext():",
        f"{_CUDA}/test_first_launch.py",
    ),
    fault(
        "rows of a small call are always aligned",
        "runtime_kernels/small_calls.py",
        "width = _WIDTH if form.aligned else _UNALIGNED",
        "width = _WIDTH",
        "runtime_kernels/test_small_calls.py",
    ),
    fault(
        "results of another driver count",
        "runtime_kernels/check_results.py",
        "*named(device), *versions(), sources)",
        "*named(device), sources)",
        f"{_CUDA}/test_check_results.py",
    ),
    fault(
        "a check that did not end is no strike",
        "runtime_kernels/check_results.py",
        "if known is None and began is not None else known",
        "if False else known",
        f"{_CUDA}/test_checks.py",
        f"{_CUDA}/test_first_launch.py",
    ),
    fault(
        "the first strike rejects",
        "runtime_kernels/check_results.py",
        "    if is_second or again:\n",
        "    if True:\n",
        f"{_CUDA}/test_check_results.py",
    ),
    fault(
        "a process that runs a check has ended",
        "runtime_kernels/check_results.py",
        "            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if",
        "            # raises if",
        f"{_CUDA}/test_check_results.py",
    ),
    fault(
        "a GEMM's check runs in clean memory",
        "runtime_kernels/selfcheck.py",
        "            block.fill_(255)",
        "            pass",
        f"{_CUDA}/test_what_runs_is_checked.py",
    ),
    fault(
        "code that the driver refuses is compiled on",
        f"{_CUDA}/jit/launch.py",
        '    return f"error {int(status)}" if int(status) in _NOT_LOADED else None\n',
        "    return None\n",
        f"{_CUDA}/test_limits.py",
    ),
    # ---- the checks of a graph ----
    fault(
        "a graph whose kernel is rejected keeps its code",
        "q2compile/torch_internals/inductor.py",
        "            if not rejected:\n                break\n",
        "            break\n",
        "q2compile/compiler/test_checks_of_a_graph.py",
    ),
    fault(
        "a pass waits for a check",
        "runtime_kernels/checks.py",
        "                begin(request)\n            return None\n",
        "                begin(request)\n",
        "q2compile/compiler/test_checks_of_a_graph.py",
    ),
    fault(
        "a call that runs during a compilation does not wait for its check",
        "runtime_kernels/registry.py",
        "if AWAITED.get() is None else awaited_in(None)",
        "",
        "q2compile/compiler/test_checks_of_a_graph.py",
    ),
    fault(
        "Inductor's caches have code for rejected kernels",
        "q2compile/compiler/pass_runner.py",
        "(*disabled_kernels(), *rejections())",
        "disabled_kernels()",
        "q2compile/compiler/test_checks_of_a_graph.py",
    ),
    # ---- grouped launches ----
    fault(
        "all calls of a checked group have equal operands",
        f"{_CUDA}/quantize/grouped_check.py",
        "ROWS[0] + 3 * number",
        "ROWS[0]",
        f"{_CUDA}/test_grouped_check.py",
    ),
    fault(
        "products of global scales are not compared",
        f"{_CUDA}/quantize/grouped_check.py",
        "for (call, own), other in group.products:",
        "for (call, own), other in ():",
        f"{_CUDA}/test_grouped_check.py",
    ),
    fault(
        "a rejected group is launched as one",
        f"{_CUDA}/call_site.py",
        "choose(GROUP, self._group(args)).name != GROUPED",
        "choose(GROUP, self._group(args)).name is ...",
        f"{_CUDA}/test_grouped_check.py",
    ),
    fault(
        "a choice holds after its kernel was rejected",
        "runtime_kernels/registry.py",
        "    KNOWN.calls[kind_of_call(kernel, args)] = reason\n    KNOWN.choices.clear()\n",
        "    KNOWN.calls[kind_of_call(kernel, args)] = reason\n",
        "runtime_kernels/test_choice.py",
    ),
    fault(
        "a choice holds whose check is awaited",
        "runtime_kernels/choice.py",
        "        if not AWAITED.get():\n",
        "        if True:\n",
        "runtime_kernels/test_choice.py",
    ),
    fault(
        "doctor checks no grouped launch of a backward",
        "q2compile/tools/kernel_rows.py",
        "for graph in layer_graphs(recipe, tuple(GEMMS), grouped, bias, **how)[0]:",
        "for graph in layer_graphs(recipe, tuple(GEMMS), grouped, bias, **how)[0][:1]:",
        "q2compile/tools/test_kernel_rows.py",
    ),
    # ---- the first large launch of a GEMM ----
    fault(
        "a product of zeros passes for its algorithm",
        f"{_CUDA}/gemm/first_launch.py",
        "    if worst <= 1 and telling < _TELLING:\n",
        "    if False:\n",
        f"{_CUDA}/test_what_runs_is_checked.py",
    ),
    fault(
        "the mark of a large launch goes although the device has failed",
        f"{_CUDA}/gemm/first_launch.py",
        "        kernels_own(error, op, name, device)  # raises if the device has failed\n",
        "",
        f"{_CUDA}/test_first_launch.py",
    ),
    fault(
        "a large result is compared as a whole alone",
        f"{_CUDA}/gemm/first_launch.py",
        "torch.maximum(whole, chunk.max())",
        "whole",
        f"{_CUDA}/test_what_runs_is_checked.py",
    ),
    fault(
        "a NaN in a large result is right",
        f"{_CUDA}/gemm/first_launch.py",
        "(got.isfinite() != want.isfinite()) * 1e30",
        "0",
        f"{_CUDA}/test_first_launch.py",
        f"{_CUDA}/test_what_runs_is_checked.py",
    ),
    fault(
        "rows of no group may be anything",
        f"{_CUDA}/gemm/first_launch.py",
        'if gemm != "wgrad" and bool(out[ends[-1] :].count_nonzero()):',
        "if False:",
        f"{_CUDA}/test_first_launch.py",
    ),
    # ---- GPUs ----
    fault(
        "the first NVRTC of a family compiles for one GPU alone",
        f"{_CUDA}/jit/limits.py",
        "if family is not None and nvrtc >= family.nvrtc:",
        "if family is not None and nvrtc > family.nvrtc:",
        f"{_CUDA}/test_limits.py",
    ),
    fault(
        "an unknown GPU gets code of the oldest",
        f"{_CUDA}/jit/limits.py",
        'Target("compute_{}{}".format(*lower[-1]), why)',
        'Target("compute_{}{}".format(*lower[0]), why)',
        f"{_CUDA}/test_limits.py",
        "end_to_end/test_first_contact.py",
    ),
    fault(
        "an unknown GPU is taken for one with fp4 tensor cores",
        f"{_CUDA}/jit/limits.py",
        "else FAMILIES.get(capability[0])",
        "else FAMILIES.get(min(capability[0], 12))",
        f"{_CUDA}/test_limits.py",
    ),
    # ---- when the device fails ----
    fault(
        "the launches that are named are the oldest ones",
        f"{_CUDA}/recent_launches.py",
        "[:_SHOWN]",
        "[-_SHOWN:]",
        f"{_CUDA}/test_recent_launches.py",
    ),
    fault(
        "no launch is named where another thread meets the error",
        f"{_CUDA}/recent_launches.py",
        "    threading.excepthook = hook_of_threads\n",
        "",
        f"{_CUDA}/test_recent_launches.py",
    ),
    fault(
        "a traceback does not come back from the process of self-checks",
        "runtime_kernels/kernel_states.py",
        "Reason, (str(self), self.state, self.traceback)",
        "Reason, (str(self), self.state)",
        "q2compile/tools/test_kernel_rows.py",
    ),
)
