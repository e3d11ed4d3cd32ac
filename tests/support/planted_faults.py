# SPDX-License-Identifier: Apache-2.0
"""Faults to plant, one at a time, and the tests that should catch each: which of them live?

    python -m tests.support.planted_faults                     all; 15 minutes on one core
    python -m tests.support.planted_faults seeds philox        those whose name or file has a word
    python -m tests.support.planted_faults --list

The working tree's tracked files are copied to a temporary folder and imported from there. A fault
replaces one text of one file by another; the tests run, and the file is as it was. To be run by
hand, and before a release. A fault that lives is a missing test. That each text is in its file once
is tested (tests/end_to_end/test_planted_faults.py).

Exit status 0: all were caught; 1: some live, which are named.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.support.compare_commits import checked_out
from tests.support.fault import Fault, fault
from tests.support.faults_of_checks import OF_CHECKS
from tests.support.faults_of_kernels import OF_KERNELS
from tests.support.faults_of_launches import OF_LAUNCHES

ROOT = Path(__file__).resolve().parents[2]
_MINUTES = 20  # more than the tests of one fault take


_NUMERICS = "runtime_kernels/numerics"
_PASSES = "q2compile/passes"

FAULTS = (
    # ---- numerics, ops, the registry ----
    fault(
        "operands of a GEMM draw the same random bits under one seed",
        "runtime_kernels/numerics/philox.py",
        "constant(seed, rng_offset), constant(seed, purpose)",
        "constant(seed, 0), constant(seed, purpose)",
        _NUMERICS,
    ),
    fault(
        "a shard's quantizer never finds the least global scale",
        "runtime_kernels/numerics/shards.py",
        "else 1536.0 * g\n",
        "else 1536.0 * g.clamp(min=2.0**-125)\n",
        f"{_NUMERICS}/test_shards.py",
    ),
    fault(
        "MS-EDEN without its correction",
        "runtime_kernels/numerics/nvfp4.py",
        "    corrected = pseudo * correction\n",
        "    corrected = pseudo\n",
        _NUMERICS,
    ),
    fault(
        "4/6 compares errors in units of two scales",
        "runtime_kernels/numerics/nvfp4.py",
        "    chosen = error_four * ratio.square() < error_six\n",
        "    chosen = error_four < error_six\n",
        _NUMERICS,
    ),
    fault(
        "MXFP4's scales are twice too large",
        "runtime_kernels/numerics/mxfp4.py",
        "exponent = exponent_of(largest) - 2",
        "exponent = exponent_of(largest) - 1",
        _NUMERICS,
    ),
    fault(
        "scales that are rounded up are so one number above 6 later",
        "runtime_kernels/numerics/mxfp4.py",
        "ABOVE_HALF = 0x3FFFFF",
        "ABOVE_HALF = 0x3FFFFE",
        _NUMERICS,
    ),
    fault(
        "all signs of a rotation are plus",
        "runtime_kernels/numerics/transforms.py",
        "return 1.0 - 2.0 * bits",
        "return 1.0 - 0.0 * bits",
        _NUMERICS,
    ),
    fault(
        "copies of few tokens count twice",
        "runtime_kernels/numerics/groups.py",
        "SHARES = (1.0, 0.5**0.5, 0.5,",
        "SHARES = (1.0, 1.0, 0.5,",
        _NUMERICS,
        "runtime_kernels/ops",
    ),
    fault(
        "scales of 4 bits round ties away from zero",
        "runtime_kernels/numerics/formats.py",
        "(bits + 0x7FFFF + odd)",
        "(bits + 0x80000)",
        _NUMERICS,
    ),
    fault(
        "swizzled scales lie in another order",
        "runtime_kernels/numerics/swizzle.py",
        "return tiles.permute(0, 3, 2, 1, 4).flatten()",
        "return tiles.permute(0, 3, 1, 2, 4).flatten()",
        _NUMERICS,
    ),
    fault(
        "dbias is added up in another order than its kernel adds",
        "runtime_kernels/numerics/column_sums.py",
        "(lanes[:, 0] + lanes[:, 1]) + (lanes[:, 2] + lanes[:, 3])",
        "((lanes[:, 0] + lanes[:, 1]) + lanes[:, 2]) + lanes[:, 3]",
        "runtime_kernels/cuda/test_dbias.py",
    ),
    fault(
        "neighboring values of the option seed give related seeds",
        "runtime_kernels/numerics/seeds.py",
        "signed(_GAMMA) + signed(mixed(key))",
        "signed(_GAMMA) + signed(key)",
        _NUMERICS,
        "runtime_kernels/ops",
        "end_to_end/test_seed.py",
    ),
    fault(
        "both operands of a gradient are said to have one seed",
        "runtime_kernels/ops/table.py",
        'self.args.get("columnwise_seed" if columnwise else "rowwise_seed")',
        'self.args.get("rowwise_seed")',
        "runtime_kernels/ops",
        _PASSES,
    ),
    fault(
        "the reference serves ahead of kernels",
        "runtime_kernels/choice.py",
        "KERNELS[op].insert(0, added)",
        "KERNELS[op].append(added)",
        "runtime_kernels/test_kernel_faults.py",
        "lowering/test_launches.py",
    ),
    *OF_KERNELS,
    *OF_CHECKS,
    *OF_LAUNCHES,
    # ---- lowering ----
    fault(
        "4/6 takes the second scale in a tie",
        "runtime_kernels/numerics/nvfp4.py",
        "chosen = error_four * ratio.square() < error_six",
        "chosen = error_four * ratio.square() <= error_six",
        _NUMERICS,
    ),
    fault(
        "4/6 by Inductor's kernel weighs errors the other way round",
        "lowering/inductor_kernels/nvfp4.py",
        "fp32.from_top_bits(self.normal_or_zero(four))",
        "fp32.from_top_bits(self.normal_or_zero(six))",
        "lowering/test_lowering.py",
    ),
    fault(
        "a group of launches is enqueued by the next one",
        "lowering/launches.py",
        "if group is None or group.last is node:",
        "if group is None:",
        "lowering/test_launches.py",
    ),
    fault(
        "a recorded quantizer stays in its launch group",
        "lowering/state.py",
        "return None if call is None or call.recorded else",
        "return None if call is None else",
        "q2compile/passes/test_group_launches.py",
    ),
    fault(
        "global scales that are in the operands are applied again",
        "lowering/gemm.py",
        "if not get_scheme(scheme).has_pow2_scale\n",
        "if get_scheme(scheme).has_pow2_scale\n",
        "lowering/test_launches.py",
    ),
    fault(
        "an operand with another reader is computed twice",
        "lowering/prologue/fused_launches.py",
        "        if readers:\n",
        "        if False:\n",
        "lowering/test_fused_launches.py",
    ),
    # ---- linear, passes, compiler ----
    fault(
        "dgrad and wgrad of a linear draw one seed",
        "q2compile/linear/autograd.py",
        '"wgrad": 2 * seed_index + 1}',
        '"wgrad": 2 * seed_index}',
        "q2compile/linear",
    ),
    fault(
        "a weight that is frozen gets a gradient, and x none",
        "q2compile/linear/autograd.py",
        "grads[i] = _backward_gemm(",
        "grads[1 - i] = _backward_gemm(",
        "q2compile/linear/test_dense.py",
    ),
    fault(
        "gradients that share a rotation draw the same random bits",
        "q2compile/passes/post_grad/share_rotations.py",
        'offset = call.args["rng_offset"] + count',
        'offset = call.args["rng_offset"]',
        "q2compile/passes/test_share_rotations.py",
    ),
    fault(
        "directions with different offsets are paired",
        "q2compile/passes/post_grad/pair_directions.py",
        'alike = (*same, call.args["transform"], call.args["rng_offset"])',
        'alike = (*same, call.args["transform"])',
        _PASSES,
    ),
    fault(
        "an amax that Inductor would fuse with what computes the tensor is left to the quantizer",
        "q2compile/passes/post_grad/amax_in_quantizer.py",
        "or not _is_in_memory(call.x)",
        "",
        "q2compile/passes/test_amax_in_quantizer.py",
    ),
    fault(
        "squares of MXFP4 that hold an Inf look finite",
        "runtime_kernels/cuda/csrc/transposable.cu",
        "largest < kInfinity ? byte : 255",
        "byte",
        "runtime_kernels/cuda/test_transposable.py",
    ),
    fault(
        "a launch is given more operands than it has room for",
        "runtime_kernels/cuda/quantize/grouped_launch.py",
        "for tail in tails) <= MOST_OPERANDS",
        "for tail in tails) <= MOST_OPERANDS + 1",
        "q2compile/passes/test_group_launches.py",
    ),
    fault(
        "alpha is made before one of its global scales",
        "q2compile/passes/post_grad/group_launches.py",
        "if other in scales or other < group[-1]:",
        "if True:",
        "q2compile/passes/test_group_launches.py",
    ),
    fault(
        "codes of weights are thought to wait until all gradients are there",
        "q2compile/passes/joint/saved_weights.py",
        "max(middle + codes - peak, 0)",
        "codes",
        "q2compile/passes/test_saved_weights.py",
    ),
    fault(
        "a seed may stand in a forward graph",
        "q2compile/passes/verify.py",
        "(seeds or is_q2(node, SEED)) and not random_forward",
        "seeds and not random_forward",
        "q2compile/passes/test_passes.py",
    ),
    fault(
        "an edited kernel is served from the cache",
        "runtime_kernels/versions.py",
        '_SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h")',
        '_SOURCES = (".py",)',
        "q2compile/compiler/test_cache_key.py",
    ),
    fault(
        "graphs with and without fuse_rotations share a cache entry",
        "q2compile/compiler/post_grad_passes.py",
        ":fuse_rotations={self.config.fuse_rotations},",
        ":",
        "q2compile/passes/test_passes.py",
    ),
    # ---- capture, rewrite, recipes, config ----
    fault(
        "any swap counts", "q2compile/graph/views.py", "} == {n - 2, n - 1}", "}", "q2compile/graph"
    ),
    fault(
        "beta is lost", "q2compile/capture/spellings.py", "!= (1, 1)", "== 0", "q2compile/capture"
    ),
    fault(
        "a transposition of x is undone though it never was",
        "q2compile/rewrite/replace.py",
        "== {n - 2, n - 1} and transposes(node)",
        "== {n - 2, n - 1}",
        "q2compile/capture",
    ),
    fault(
        "the first pattern of a policy decides",
        "q2compile/recipes/policy.py",
        "for rule in reversed(self.rules):",
        "for rule in self.rules:",
        "q2compile/recipes",
    ),
    fault(
        "a recipe is in none of the lists that name all",
        "q2compile/recipes/published.py",
        '            "quartet2_search",\n',
        '            "quartet2_best",\n',
        "q2compile/recipes/test_recipes.py",
    ),
    fault(
        "a recipe may rotate one operand alone",
        "q2compile/recipes/resolve.py",
        "if gemm.a.transform != gemm.b.transform:",
        "if False:",
        "q2compile/recipes",
    ),
    fault(
        "fuse_rotations=True is taken where nothing is lowered",
        "q2compile/config.py",
        'if self.inner == "eager" and self.fuse_rotations is True:',
        "if False:",
        "q2compile/test_config.py",
    ),
    # ---- saved tensors, telemetry, reports, tools ----
    fault(
        "codes of a weight stay after it has changed",
        "q2compile/weight_cache/cache.py",
        "        if state != self.state:\n",
        "        if self.state is None:\n",
        "q2compile/weight_cache",
    ),
    fault(
        "a shard is quantized under a global scale of its own",
        "runtime_kernels/numerics/shards.py",
        "else 1536.0 * g\n",
        "else 0.0 * g\n",
        "runtime_kernels/numerics",
    ),
    fault(
        "graphs with gathered codes are replayed as CUDA graphs",
        "q2compile/compiler/compile_graph.py",
        "    if gathered and gathered.takes_codes and uses_cuda_graphs(config):\n",
        "    if False:\n",
        "q2compile/weight_cache",
    ),
    fault(
        "FSDP2 moves an offloaded shard, and finds no codes",
        "q2compile/torch_internals/fsdp.py",
        "            if self._record.offload_to_cpu:\n                # FSDP2",
        "            if False:\n                # FSDP2",
        "q2compile/torch_internals",
    ),
    fault(
        "statistics of a gradient's columns are those of its rows",
        "q2compile/telemetry/into_graph.py",
        'call.outputs.index("statistics") + which',
        'call.outputs.index("statistics")',
        "q2compile/telemetry/test_recording.py",
    ),
    fault(
        "an error is said to come from where it was caught",
        "q2compile/failures/stage_error.py",
        "{frames[-1].filename}:{frames[-1].lineno}",
        "{frames[0].filename}:{frames[0].lineno}",
        "q2compile/failures",
    ),
    fault(
        "transposed codes count as half of their elements",
        "q2compile/report/saved_for_backward.py",
        "(2 if pairs else 1) * hint_of",
        "hint_of",
        "q2compile/report",
    ),
    fault(
        "a global scale is exported where its reciprocal belongs",
        "q2compile/tools/export/formats.py",
        "(1.0 / scale if self.reciprocal else scale)",
        "(scale)",
        "q2compile/tools/export",
    ),
    fault(
        "a replacement of torch's is in force in other threads",
        "q2compile/torch_internals/patches.py",
        "ours = self.live and _here.depth > 0",
        "ours = self.live",
        "q2compile/torch_internals/test_patches.py",
    ),
    fault(
        "the product of global scales costs no launch",
        "q2compile/cost_model/prices.py",
        'ahead = _ALPHA if first.format == "nvfp4" and ALPHA_FROM not in node.meta else 0',
        "ahead = 0",
        "q2compile/cost_model",
    ),
)


# pytest puts the tree ahead on sys.path, where q2compile/ is without the two packages that are
# installed into it: they would come from the working tree, which has no fault.
_RUN = """
import sys, pytest
tree = sys.argv[1]
sys.path[:0] = [f"{tree}/installed", tree]
import q2compile
assert q2compile.__file__.startswith(tree), q2compile.__file__
sys.exit(pytest.main(sys.argv[2:]))
"""


def lives(planted: Fault, tree: Path) -> bool:
    """Whether the tests pass with the fault in a tree's file."""
    path, tree = tree / planted.file, tree.resolve()
    text = path.read_text()
    path.write_text(planted.planted(text))
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RUN, str(tree), *options, *planted.tests],
            cwd=tree,
            capture_output=True,
            text=True,
            timeout=60 * _MINUTES,
        )
    finally:
        path.write_text(text)
    # 1: a test failed. An error in collection, 2, or no tests, 5, would prove nothing.
    assert done.returncode in (0, 1), f"{planted.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    print(f"    {failed[0] if failed else done.stdout.strip().splitlines()[-1]}")
    return done.returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="of names or files; by default all faults")
    parser.add_argument("--list", action="store_true", help="print the faults, plant none")
    arguments = parser.parse_args(argv)
    words = arguments.words or [""]
    chosen = [f for f in FAULTS if any(word in f"{f.name} {f.file}" for word in words)]
    if arguments.list:
        print("\n".join(f"{f.file}: {f.name}" for f in chosen))
        return 0
    living = []
    with tempfile.TemporaryDirectory() as folder:
        tree = checked_out(None, Path(folder) / "tree")
        for package in ("lowering", "runtime_kernels"):  # for processes that the tests start
            (tree / "q2compile" / package).symlink_to(tree / package)
        for planted in chosen:
            print(f"{planted.file}: {planted.name}", flush=True)
            start = time.monotonic()
            if lives(planted, tree):
                living.append(planted)
            found = "LIVES" if planted in living else "caught"
            print(f"    {found} {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(chosen)} planted, {len(living)} live")
    for planted in living:
        print(f"    {planted.file}: {planted.name}; tests: {' '.join(planted.tests)}")
    return bool(living)


if __name__ == "__main__":
    raise SystemExit(main())
