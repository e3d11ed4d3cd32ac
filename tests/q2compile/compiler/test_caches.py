# SPDX-License-Identifier: Apache-2.0
"""torch's caches hold the compiled graphs, under keys that include the options.

A process takes many seconds to import torch and to compile: each compiles for several options, with
torch's compiler reset between them.
"""

import json

from tests.support import forked


def python(code, cache):
    """Run ``code`` in a fresh process with its own compiler cache; its output."""
    done = forked.run(code, cwd=cache, TORCHINDUCTOR_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


COLD = """
import sys, torch
for at, options in enumerate({every}):
    torch.compiler.reset()
    m = torch.nn.Linear(32, 32)
    if at == 0:
        assert not any(name.startswith("q2compile") for name in sys.modules)
    c = torch.compile(m, backend="quartet2", options=options)
    c(torch.ones(4, 32)).sum().backward()
    from torch._dynamo.utils import counters
    print([counters["aot_autograd"]["autograd_cache_" + what] for what in ("hit", "miss", "bypass")]
          + [counters["inductor"]["fxgraph_cache_bypass"]])
    counters.clear()
    assert m.weight.grad.abs().sum() > 0
"""


def test_a_cold_process_needs_no_import_and_caches_hit_and_miss(tmp_path):
    """A second process takes the compiled graphs from torch's caches; a changed recipe does not,
    nor does one pass less. The first graphs still hit after them, so no state of the process made
    the others miss."""

    def counts(*every):
        out = python(COLD.replace("{every}", repr(every)), tmp_path)
        return [json.loads(line) for line in out.splitlines()]

    assert counts({}) == [[0, 1, 0, 0]]
    changed = {"recipe": {"base": "quartet2", "dgrad": "bf16"}}
    disabled = {"disable_passes": ["merge_seeds"]}
    second, *others, again = counts({}, changed, disabled, {})
    assert second == again == [1, 0, 0, 0]
    assert [other[:2] for other in others] == [[0, 1], [0, 1]]


MEGA_CACHE = """
import torch
from torch._dynamo.utils import counters
artifacts, results = {files}
if {loads}:
    torch.compiler.load_cache_artifacts(open(artifacts, "rb").read())
found = []
for options in ({}, {"cache_weights": True}):
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    m = torch.nn.Sequential(
        torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 64, bias=False))
    y = torch.compile(m, backend="quartet2", options=options)(torch.randn(32, 64))
    y.square().mean().backward()
    found += [y.detach(), *(p.grad for p in m.parameters())]
    counted = counters["aot_autograd"]
    print([counted["autograd_cache_" + what] for what in ("hit", "miss", "bypass")])
if {loads}:
    print([torch.equal(a, b) for a, b in zip(found, torch.load(results), strict=True)])
else:
    torch.save(found, results)
    with open(artifacts, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
"""


def test_caches_travel_as_one_file(tmp_path):
    """torch's mega cache: a second process, with no cache on its disk, compiles nothing and
    computes the same bits. Codes of two weights are made by two graphs more."""
    files = (str(tmp_path / "artifacts"), str(tmp_path / "results.pt"))
    outputs = []
    for loads in (False, True):
        code = MEGA_CACHE.replace("{files}", repr(files)).replace("{loads}", str(loads))
        cache = tmp_path / f"cache{loads}"
        cache.mkdir()
        outputs.append(python(code, cache).splitlines())
    assert outputs[0] == [str([0, 1, 0]), str([0, 3, 0])]
    assert outputs[1] == [str([1, 0, 0]), str([3, 0, 0]), str([True] * 6)]
