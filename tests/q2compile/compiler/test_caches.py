"""torch's caches hold what is compiled, and tell options apart; each process is a fresh one."""

import os
import subprocess
import sys

import pytest

# In an empty cache Inductor would try which vectors g++ can, and compile their headers: most of the
# time that a process takes here.
SCALAR = {"TORCHINDUCTOR_VEC_ISA_OK": "0", "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0"}


def python(code, cache):
    """Run ``code`` in a fresh process with its own compiler cache; its output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **SCALAR, "TORCHINDUCTOR_CACHE_DIR": str(cache)},
        cwd=cache,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


COLD = """
import sys, torch
m = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
assert not any(name.startswith("q2compile") for name in sys.modules)
c = torch.compile(m, backend="quartet2", options={options})
c(torch.ones(4, 32)).sum().backward()
from torch._dynamo.utils import counters
for counter, kind in (("autograd_cache_hit", "aot_autograd"), ("autograd_cache_miss",
"aot_autograd"),
                      ("autograd_cache_bypass", "aot_autograd"), ("fxgraph_cache_bypass",
                      "inductor")):
    print(counter, counters[kind][counter])
print("triton" in sys.modules and "no GPU here", m[0].weight.grad.abs().sum() > 0)
"""


def test_a_cold_process_needs_no_import_and_caches_hit_and_miss(tmp_path):
    """A second process takes the compiled graphs from torch's caches; a changed recipe does not."""

    def counts(options):
        out = python(COLD.replace("{options}", repr(options)), tmp_path)
        return dict(line.split() for line in out.splitlines() if line.startswith(("auto", "fx")))

    first = counts({})
    assert (first["autograd_cache_miss"], first["autograd_cache_hit"]) == ("1", "0")
    assert first["autograd_cache_bypass"] == first["fxgraph_cache_bypass"] == "0"
    second = counts({})
    assert (second["autograd_cache_miss"], second["autograd_cache_hit"]) == ("0", "1")
    changed = counts({"recipe": {"base": "quartet2", "dgrad": "bf16"}})
    assert (changed["autograd_cache_miss"], changed["autograd_cache_hit"]) == ("1", "0")
    disabled = counts({"disable_passes": ["merge_seeds"]})
    assert disabled["autograd_cache_hit"] == "0"


MEGA_CACHE = """
import sys, torch
from torch._dynamo.utils import counters
artifacts, results = {files}
options = {options}
torch.manual_seed(0)
m = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False), torch.nn.Linear(96, 64, bias=False))
x = torch.randn(32, 64)
if {loads}:
    torch.compiler.load_cache_artifacts(open(artifacts, "rb").read())
y = torch.compile(m, backend="quartet2", options=options)(x)
y.square().mean().backward()
found = [y.detach(), *(p.grad for p in m.parameters())]
if {loads}:
    print([torch.equal(a, b) for a, b in zip(found, torch.load(results))])
else:
    torch.save(found, results)
    with open(artifacts, "wb") as file:
        file.write(torch.compiler.save_cache_artifacts()[0])
print([counters["aot_autograd"]["autograd_cache_" + what] for what in ("hit", "miss", "bypass")])
"""


@pytest.mark.parametrize(("options", "graphs"), [({}, 1), ({"cache_weights": True}, 3)])
def test_caches_travel_as_one_file(options, graphs, tmp_path):
    """torch's mega cache: a second process, with no cache on its disk, compiles nothing and
    computes the same bits. Codes of two weights are made by two graphs more."""
    files = (str(tmp_path / "artifacts"), str(tmp_path / "results.pt"))
    outputs = []
    for loads in (False, True):
        code = MEGA_CACHE.replace("{files}", repr(files)).replace("{options}", repr(options))
        cache = tmp_path / f"cache{loads}"
        cache.mkdir()
        outputs.append(python(code.replace("{loads}", str(loads)), cache).splitlines())
    assert outputs[0] == [str([0, graphs, 0])]
    assert outputs[1] == [str([True] * 3), str([graphs, 0, 0])]
