# SPDX-License-Identifier: Apache-2.0
"""The GEMM kernel that is tried first after `q2compile bench` measured it, on a pretended GPU."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from q2compile.runtime_kernels import registry
from q2compile.runtime_kernels.cuda.gemm import cublaslt_fp4, cuda_bf16, remembered, triton_fp4
from q2compile.runtime_kernels.cuda.gemm.remembered import Choice, remember
from q2compile.runtime_kernels.registry import KernelWarning, serving

SHAPES = {(512, 4096, 4096): "triton_fp4", (16384, 4096, 4096): "cublaslt_fp4"}


@pytest.fixture(autouse=True)
def blackwell(gpu, monkeypatch, tmp_path):
    """A GPU of compute capability 10.0, with all candidates, and an empty cache folder."""
    gpu((10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA B200")
    monkeypatch.setattr(triton_fp4, "triton_version", lambda: (3, 8))
    monkeypatch.setattr(remembered, "triton_version", lambda: (3, 8))
    for module in (cublaslt_fp4, cuda_bf16, triton_fp4):
        monkeypatch.setattr(module, "rejection", lambda *names: None)
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(remembered.VARIABLE, raising=False)
    remembered.forget()
    yield tmp_path
    remembered.forget()


def remembered_choices(format: str = "nvfp4"):
    return remember(
        0, [Choice(format, shape, name) for shape, name in SHAPES.items()], "2026-11-22"
    )


def serves(m: int, n: int = 4096, k: int = 4096, scheme: str = "nvfp4_46_pow2@32x4x4") -> str:
    with FakeTensorMode():
        args = arguments(m, n, k, scheme)
    return serving("gemm", args).name


def arguments(m, n, k, scheme):
    def operand(rows):
        codes = torch.empty(rows, k // 2, dtype=torch.uint8, device="cuda:0")
        scales = torch.empty(128, dtype=torch.float8_e4m3fn, device="cuda:0")
        return codes, scales, torch.empty((), device="cuda:0")

    return [*operand(m), *operand(n), None, scheme, scheme, torch.bfloat16]


def test_without_a_file_the_usual_order() -> None:
    assert serves(512) == serves(16384) == "cublaslt_fp4"
    assert remembered.described() == []


def test_the_fastest_at_the_nearest_shape_is_tried_first() -> None:
    remembered_choices()
    assert [serves(m) for m in (130, 512, 2000, 2048, 4096, 16384)] == [
        *(["triton_fp4"] * 3),  # to the nearest in the logarithm: 512 and 16384 meet at 2896
        *("triton_fp4", "cublaslt_fp4", "cublaslt_fp4"),
    ]


def test_an_algorithm_is_remembered_with_its_shape() -> None:
    algorithm = (66, 2, 1, 0, 1, 0, 3, 0, 5)
    shape = (512, 4096, 4096)
    remember(0, [Choice("nvfp4", shape, "cublaslt_fp4", algorithm)], "2026-11-25")
    assert serves(512) == "cublaslt_fp4"
    assert remembered.remembered_algorithm(0, 600, 4096, 4096) == algorithm
    assert remembered.remembered_algorithm(0, 600, 128, 4096) is None


def test_nothing_is_said_of_shapes_far_away_or_other_formats() -> None:
    remembered_choices()
    assert serves(127) == serves(512, n=1000) == serves(512, k=32768) == "cublaslt_fp4"
    assert serves(512, n=1024) == serves(512, k=16384) == "triton_fp4"
    assert serves(512, scheme="nvfp4_46_pow2@bf16") == "cuda_bf16"
    remembered_choices("mxfp4")
    assert serves(512) == "cublaslt_fp4"


def test_a_symbolic_size_takes_the_usual_order_and_no_guard() -> None:
    remembered_choices()
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        rows = env.create_unbacked_symint()
        args = arguments(rows, 4096, 4096, "nvfp4_46_pow2@32x4x4")
        assert remembered.chosen(args) is None
    assert not env.guards


def test_what_declines_is_not_taken(monkeypatch) -> None:
    """The choice changes the order of kernels, but does not run one that is unsupported or
    rejected."""
    remembered_choices()
    monkeypatch.setattr(triton_fp4, "rejection", lambda *names: "it failed its self-check")
    assert serves(512) == "cublaslt_fp4"


def test_a_chosen_kernel_that_fails_is_replaced_by_the_usual_one() -> None:
    ran = []

    def kernel(name, fails):
        def function(*args):
            ran.append(name)
            if fails:
                raise RuntimeError("no")
            return name

        return registry.Kernel("gemm", name, None, function)

    remembered_choices()
    with FakeTensorMode():
        args = tuple(arguments(512, 4096, 4096, "nvfp4_46_pow2@32x4x4"))
    candidates = [kernel("cublaslt_fp4", False), kernel("triton_fp4", True)]
    with pytest.warns(KernelWarning, match="triton_fp4"):
        assert registry._run(candidates, args) == "cublaslt_fp4"
    assert ran == ["triton_fp4", "cublaslt_fp4"]
    assert registry._run(candidates, args) == "cublaslt_fp4"
    assert ran[2:] == ["cublaslt_fp4"]


def test_it_is_switched_off_by_name(monkeypatch) -> None:
    remembered_choices()
    monkeypatch.setenv(remembered.VARIABLE, "off")
    assert serves(512) == "cublaslt_fp4"
    remembered.forget()
    monkeypatch.setenv(remembered.VARIABLE, "no")
    with pytest.raises(ValueError, match="Q2COMPILE_GEMM_CHOICES: got 'no'; allowed: on, off"):
        serves(512)


def test_reports_say_it(monkeypatch) -> None:
    remembered_choices()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (text,) = remembered.described()
    assert text == (
        "q2::gemm on cuda:0 is run by the kernel that `q2compile bench` found the fastest at 2 "
        "shapes on 2026-11-22; another kernel sums in another order, within a rounding of the "
        "result. Q2COMPILE_GEMM_CHOICES=off ignores them"
    )
    assert registry.preferences() == [text]


SPOILED = {
    "cut off": lambda text: text[: len(text) // 2],
    "no object": lambda text: "3",
    "deep": lambda text: "[" * 100_000,
    "another device": lambda text: text.replace("B200", "B300"),
    "another version": lambda text: text.replace(torch.__version__, "2.99"),
    "another schema": lambda text: text.replace('"schema": 3', '"schema": 2'),
    "no date": lambda text: text.replace('"date"', '"day"'),
    "an unknown kernel": lambda text: text.replace("triton_fp4", "cuda_bf16"),
    "a size that is none": lambda text: text.replace("512", "-512"),
    "a shape of two": lambda text: text.replace("512,", ""),
    "an algorithm that is none": lambda text: text.replace(": null", ': ["1"]'),
    "more": lambda text: text.replace('"fastest"', '"theirs": 1, "fastest"'),
}


@pytest.mark.parametrize("how", SPOILED)
def test_a_file_that_cannot_be_used_is_one_warning(how) -> None:
    path = remembered_choices()
    path.write_text(SPOILED[how](path.read_text()))
    with pytest.warns(
        KernelWarning, match=rf"{path.name}.* is ignored: .*\n.*q2compile bench"
    ) as w:
        assert serves(512) == "cublaslt_fp4"
    assert len(w) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serves(512) == serves(2048) == "cublaslt_fp4"


def test_bytes_that_are_no_text_and_a_folder(tmp_path) -> None:
    path = remembered_choices()
    path.write_bytes(b"\xff\xfe")
    with pytest.warns(KernelWarning, match="is ignored"):
        assert serves(512) == "cublaslt_fp4"
    path.unlink()
    path.mkdir()
    remembered.forget()
    with pytest.warns(KernelWarning, match="is ignored"):
        assert serves(512) == "cublaslt_fp4"


def test_of_each_device_and_version_a_file_of_its_own(monkeypatch, tmp_path) -> None:
    first = remembered_choices()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA B300")
    remembered.forget()
    assert serves(512) == "cublaslt_fp4"
    assert remembered_choices() != first
    assert len(list(tmp_path.glob("gemm-*.json"))) == 2
    assert json.loads(first.read_text())["choices"][0] == {
        "format": "nvfp4",
        "shape": [512, 4096, 4096],
        "fastest": "triton_fp4",
        "algorithm": None,
    }
