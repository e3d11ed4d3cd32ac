# SPDX-License-Identifier: Apache-2.0
"""Faults of the machine and of its files: each leads to a clear message or to the right result.
Compilers, GPUs, folders, caches, files with hostile content."""

import errno
import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from q2compile import explain
from q2compile.config import CONFIG_FILE_VARIABLE, Config, resolved_policy
from q2compile.errors import StageError
from q2compile.runtime_kernels import cache_folder, registry, selfcheck
from q2compile.runtime_kernels.cache_folder import cache_dir, read_whole
from q2compile.runtime_kernels.cuda.jit import limits, nvrtc
from q2compile.runtime_kernels.registry import KernelWarning
from q2compile.runtime_kernels.small_calls import form_of
from tests.support import forked, quantizer_calls
from tests.support.page_data import data_of
from tests.support.warned import texts

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EAGER = {"inner": "eager"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


def compiled(model=None, **options):
    return torch.compile(model or Net(), backend="quartet2", options={**EAGER, **options})


# ---- compilers and GPUs -------------------------------------------------------------------------


def test_no_cxx_compiler():
    """Inductor needs one on a CPU. The message says so, and inner="eager" does without."""
    model, x = Net(), torch.randn(8, 32)
    said = "(?s)No working C.. compiler found.*no-such-compiler.*inner='eager' runs"
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(StageError, match=said):
            torch.compile(model, backend="quartet2")(x)
        torch._dynamo.reset()
        on_error = {"on_error": "bf16"}  # Inductor alone can't compile it either, and says so
        with pytest.raises(RuntimeError, match="No working"), pytest.warns(RuntimeWarning):
            torch.compile(model, backend="quartet2", options=on_error)(x)
        torch._dynamo.reset()
        compiled(model)(x).sum().backward()
    assert model.up.weight.grad.isfinite().all()


STEP = """
import sys
sys.modules.update(dict.fromkeys({blocked}))
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
compiled = torch.compile(model, backend="quartet2", options={{"inner": "eager"}})
compiled(torch.randn(8, 32)).sum().backward()
print(model[0].weight.grad.double().sum().item())
"""


def test_without_triton_and_nvrtc_a_cpu_trains_the_same():
    blocked = "triton", "cuda", "cuda.bindings", "cuda.bindings.nvrtc"
    with_all = forked.start(STEP.format(blocked=()))
    command = [sys.executable, "-c", STEP.format(blocked=blocked)]
    without = subprocess.run(command, capture_output=True, text=True)
    assert without.stdout == with_all.wait().stdout != "", without.stderr


def rht_arguments():
    """Arguments of a rotating q2::quantize, on a GPU that is not there."""
    with FakeTensorMode():
        x = torch.empty(32, 64, device="cuda:0", dtype=torch.bfloat16)
        seed = torch.empty((), device="cuda:0", dtype=torch.int64)
    return quantizer_calls.one(x, seed, "nvfp4_ms_eden_pow2", "rht128", False).positional


def test_a_gpu_without_kernels_runs_the_reference_and_says_why(gpu):
    gpu((7, 5))
    arguments = rht_arguments()
    with pytest.warns(RuntimeWarning, match="none of its CUDA kernels runs on cuda:0") as said:
        for _ in range(2):
            assert registry.choose("quantize", arguments).name == "reference"
    assert len(texts(said, RuntimeWarning)) == 1
    with pytest.raises(ValueError, match="capability 8.0 and higher, not for 7.5"):
        registry.select("quantize", arguments, "cuda")


@pytest.mark.parametrize("capability", limits.ARCHITECTURES)
@pytest.mark.parametrize("wrong", [None, "1 of 9 codes differ from the reference"])
def test_a_kernel_is_checked_once(gpu, monkeypatch, capability, wrong):
    checks = []
    gpu(capability)
    monkeypatch.setattr(selfcheck, "disagreement", lambda *what: checks.append(what) or wrong)
    arguments = rht_arguments()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        served = {registry.choose("quantize", arguments).name for _ in range(2)}
    assert served == {"cuda" if wrong is None else "reference"}
    cost = "Another runs in its place: a torch reference takes 10 to 30 times as long."
    assert [cost in said for said in texts(caught, KernelWarning)] == [True] * bool(wrong)
    (what,) = checks
    assert what == ("cuda", torch.device("cuda", 0), form_of("quantize", arguments))


def test_a_gpu_without_nvrtc_runs_the_reference_and_says_what_to_install(gpu, monkeypatch):
    version = nvrtc.version
    gpu((9, 0))
    monkeypatch.setattr(nvrtc, "version", version)
    version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    arguments = rht_arguments()
    try:
        with pytest.warns(RuntimeWarning, match="none of its CUDA kernels runs"):
            assert registry.choose("quantize", arguments).name == "reference"
        assert registry.choose("quantize", arguments).name == "reference"
        with pytest.raises(ValueError, match="pip install cuda-bindings nvidia-cuda-nvrtc"):
            registry.select("quantize", arguments, "cuda")
    finally:
        version.cache_clear()


# ---- the cubin cache ----------------------------------------------------------------------------

VARIANT = nvrtc.KernelVariant("dequantize.cu", ())


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder, and a compiler that counts: no GPU and no time is needed."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(folder))
    built = []

    def compile_variant(variant, architecture):
        built.append(architecture)
        return b"machine code", ""

    monkeypatch.setattr(nvrtc, "compile_variant", compile_variant)
    return folder, built


def test_a_full_disk_costs_a_compilation_and_leaves_no_half_file(cache, monkeypatch):
    folder, built = cache

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert nvrtc.cubin(VARIANT, "sm_90a") == nvrtc.cubin(VARIANT, "sm_90a") == b"machine code"
    assert len(built) == 2 and list(folder.iterdir()) == []


@pytest.mark.parametrize("how", ["read-only", "no folder"])
def test_a_cache_that_cannot_be_written_is_a_temporary_one(cache, monkeypatch, caplog, how):
    """Root can write to read-only folders, so the test raises the operating system's error
    itself. Said once; the next process finds the folder, in which a mark survives a hang."""
    folder, built = cache
    temporary = folder.parent / f"q2compile-{os.getuid()}"
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(folder.parent))
    if how == "no folder":
        monkeypatch.setenv("Q2COMPILE_CACHE_DIR", "/dev/null/nowhere")
    else:
        own = tempfile.TemporaryFile

        def read_only(dir=None, **more):
            if dir == folder:
                raise OSError(errno.EROFS, "Read-only file system")
            return own(dir=dir, **more)

        monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    try:
        for _ in range(2):
            cache_folder.why_unwritable.cache_clear()  # as in a new process
            caplog.clear()
            for _ in range(2):
                assert nvrtc.cubin(VARIANT, "sm_90a") == b"machine code"
            (said,) = [r.getMessage() for r in caplog.records]
            why = "Read-only file system" if how == "read-only" else "Not a directory"
            assert f"can't be written ({why})" in said and "Q2COMPILE_CACHE_DIR" in said
            assert cache_folder.why_temporary() in said
        assert len(built) == 1 and [path.suffix for path in temporary.iterdir()] == [".cubin"]
        temporary.chmod(0o777)  # where anyone may put code
        cache_folder._temporary.cache_clear()
        assert cache_dir().name.startswith(f"{temporary.name}-")
    finally:
        cache_folder.why_unwritable.cache_clear()
        cache_folder._temporary.cache_clear()


@pytest.fixture
def no_home(monkeypatch, tmp_path) -> Path:
    """A container with --user: no HOME, and no entry in the user database. Returns the folder that
    the cache of such a user has."""

    def unknown(uid):
        raise KeyError(uid)

    for name in ("Q2COMPILE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"q2compile-{os.getuid()}"


def test_a_user_without_a_home_has_a_cache_among_temporary_files(no_home):
    assert cache_dir() == no_home == cache_dir()
    assert stat.S_IMODE(no_home.stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["a link", "a file", "another user's"])
def test_a_cache_that_another_user_may_have_planted_is_not_read(kind, no_home, monkeypatch):
    """The cache holds code. The folder for temporary files is everyone's."""
    if kind == "a link":
        no_home.symlink_to(no_home.parent)
    elif kind == "a file":
        no_home.touch()
    else:
        no_home.mkdir()
        user = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
        no_home.rename(no_home.with_name(f"q2compile-{user + 1}"))
    found = cache_dir()
    assert found == cache_dir() and found.name.startswith(f"q2compile-{os.getuid()}-")
    assert stat.S_IMODE(found.stat().st_mode) == 0o700 and list(found.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 4096, "other", "truncated"])
def test_a_corrupt_cubin_is_never_loaded(cache, content):
    folder, built = cache
    nvrtc.cubin(VARIANT, "sm_90a")
    (path,) = folder.iterdir()
    good = path.read_bytes()
    damaged = {"other": good[:32] + good[33:] + b"!", "truncated": good[:-1]}
    path.write_bytes(damaged.get(content, content) if isinstance(content, str) else content)
    assert nvrtc.cubin(VARIANT, "sm_90a") == b"machine code"
    assert (len(built), path.read_bytes()) == (2, good)


BUILD = """
import sys, time
from pathlib import Path
from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzle_launch
from q2compile.runtime_kernels.cuda.jit import limits, nvrtc
variant, started = swizzle_launch().variant, nvrtc.compile_variant
def meet(*arguments):  # neither finds the other's file
    Path({folder!r}, "at-" + {me!r}).touch()
    while len(list(Path({folder!r}).glob("at-*"))) < 2:
        time.sleep(0.01)
    return started(*arguments)
nvrtc.compile_variant = meet
import hashlib
from tests.support import quantizer_calls
from q2compile.runtime_kernels import selfcheck
print(hashlib.sha256(nvrtc.cubin(variant, "sm_90a")).hexdigest())
"""


def test_two_processes_build_one_cubin_at_once(tmp_path):
    cache = tmp_path / "cache"
    processes = [
        forked.start(BUILD.format(folder=str(tmp_path), me=me), Q2COMPILE_CACHE_DIR=str(cache))
        for me in "ab"
    ]
    outputs = [process.wait() for process in processes]
    digests = {done.stdout for done in outputs}
    assert len(digests) == 1 and digests != {""}, outputs
    (path,) = cache.iterdir()
    assert read_whole(path) is not None


def test_ctrl_c_while_a_cubin_is_written_leaves_no_file(cache, monkeypatch, ctrl_c):
    folder, built = cache
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", lambda *_: signal.raise_signal(signal.SIGINT))
        nvrtc.cubin(VARIANT, "sm_90a")
    assert list(folder.iterdir()) == []
    nvrtc.cubin(VARIANT, "sm_90a")
    assert len(list(folder.iterdir())) == 1


# ---- Inductor's cache ---------------------------------------------------------------------------


def test_a_damaged_inductor_cache_gives_the_same_numbers(tmp_path, monkeypatch):
    """Every cached graph is truncated. torch then compiles anew instead of loading it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, x = nn.Sequential(nn.Linear(32, 32)), torch.randn(4, 32)
    torch._inductor.utils.clear_caches()
    y = torch.compile(model, backend="quartet2")(x)
    kept = [p for name in ("aotautograd", "fxgraph") for p in (tmp_path / name).rglob("*")]
    files = [p for p in kept if p.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="quartet2")(x), y)


# ---- the dump folder ----------------------------------------------------------------------------


def test_a_dump_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="dump: cannot write .*file.*: .*leave 'dump' out"):
        compiled(dump=str(tmp_path / "file" / "graphs"))(torch.randn(4, 32))


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_a_full_disk_stops_a_dump_with_a_message(tmp_path, monkeypatch, inner):
    """Also during Inductor's compilation, where torch wraps the error."""
    write = Path.write_text

    def full(path, *args, **kwargs):
        if path.name == "2_forward.txt":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ValueError, match="dump: cannot write .*2_forward.txt: No space left"):
        compiled(dump=str(tmp_path), inner=inner)(torch.randn(4, 32))


def test_a_dump_never_leaves_the_folder_named(tmp_path):
    """Names of modules, classes and files come from the model; files of a dump are numbered."""
    hostile = ("..", "../up", "a/../../../x", "/etc/x", "con\0", "<script>alert(1)</script>")
    model = type("../../Net", (Net,), {})()
    for name in hostile:
        model._modules[name] = nn.Linear(32, 32)
    model.forward = lambda x: sum(model._modules[name](x) for name in hostile)
    graphs = tmp_path / "inside" / "graphs"
    report = explain(model, torch.randn(4, 32), options={**EAGER, "dump": str(graphs)})
    assert len(report.rows) >= len(hostile)
    page = report.to_html()
    assert "<script>alert" not in page and "<script>alert" in json.dumps(data_of(page))
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert written and all(p.resolve().is_relative_to(graphs) for p in written)


@pytest.mark.parametrize("name", ["graph_0", "report.txt", ".q2compile"])
def test_a_dump_follows_no_link_out_of_its_folder(tmp_path, name):
    elsewhere, graphs = tmp_path / "elsewhere", tmp_path / "graphs"
    graphs.mkdir()
    if name == "graph_0":
        elsewhere.mkdir()
    else:
        elsewhere.write_text("mine")
    (graphs / name).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="it is a symbolic link"):
        compiled(dump=str(graphs))(torch.randn(4, 32))
    if name == "graph_0":
        assert list(elsewhere.iterdir()) == []
    else:
        assert elsewhere.read_text() == "mine"


# ---- a config file and a policy are data --------------------------------------------------------

HOSTILE = (
    "__import__('os').system('touch {target}')",
    "re:(?P<x>__import__('os').system('touch {target}'))",
    "re:.*(?#{{exec(open('{target}','w'))}})",
    "$(touch {target})",
    "`touch {target}`",
    "{{0.__class__.__init__.__globals__}}",
    "%(x)s; touch {target}",
    "!!python/object/apply:os.system ['touch {target}']",
)


def test_nothing_in_a_config_file_is_evaluated(tmp_path, monkeypatch):
    """In every position, a hostile string is an unknown name or is rejected."""
    for text, kind in product(HOSTILE, ["json", "toml"]):
        target = tmp_path / "touched"
        text = text.format(target=target)
        monkeypatch.setenv(CONFIG_FILE_VARIABLE, str(tmp_path / f"q2.{kind}"))
        for config in (
            {"recipe": text},
            {"policy": {text: "bf16"}},
            {"policy": {"*": text}},
            {"policy": {"*": {"recipe": "nvfp4", "dgrad": text}}},
            {"inductor": {text: True}},
            {text: 1},
            {"disable_passes": [text]},
            {"mode": text},
        ):
            content = json.dumps(config)
            if kind == "toml":
                content = "\n".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in config.items())
            (tmp_path / f"q2.{kind}").write_text(content)
            try:
                policy = resolved_policy(Config.from_options(None))
            except ValueError as error:
                assert not isinstance(error, UnicodeError) and str(error)
            else:
                assert "policy" in config and policy.resolve("model.layers.0")[0].name == "quartet2"
        assert not target.exists()


def _toml(value):
    """A value as inline TOML, whose strings are written as JSON's are."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)
