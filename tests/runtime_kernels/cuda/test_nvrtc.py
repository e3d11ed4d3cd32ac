# SPDX-License-Identifier: Apache-2.0
"""The loader of the CUDA kernels, without a GPU: its errors, and the cache of machine code."""

from __future__ import annotations

import io

import pytest
import torch

from q2compile.runtime_kernels.cache_folder import read_whole
from q2compile.runtime_kernels.cuda.gemm.swizzle import swizzle_launch
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import params_bytes
from q2compile.runtime_kernels.cuda.quantize.align_scales import align_launch
from q2compile.runtime_kernels.numerics.schemes import get_scheme

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings", exc_type=ImportError)


def test_errors_name_the_file_and_carry_the_log(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void broken() {\n  missing();\n}\n')
    monkeypatch.setattr(nvrtc, "SOURCES", tmp_path)
    nvrtc.common_headers.cache_clear()
    try:
        with pytest.raises(nvrtc.CompileError, match=r'broken\.cu\(2\): error: .*"missing"'):
            nvrtc.cubin(nvrtc.KernelVariant("broken.cu", ()), "sm_90a")
    finally:
        nvrtc.common_headers.cache_clear()


def test_a_corrupt_cubin_is_compiled_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    variant = swizzle_launch().variant
    code = nvrtc.cubin(variant, "sm_90a")
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert nvrtc.cubin(variant, "sm_90a") == code
    assert read_whole(path) == code
    assert [p for p in tmp_path.iterdir() if p != path] == []


def test_a_good_cubin_is_not_compiled_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", str(tmp_path))
    variant = swizzle_launch().variant
    code = nvrtc.cubin(variant, "sm_90a")
    monkeypatch.setattr(nvrtc, "compile_variant", None)
    assert nvrtc.cubin(variant, "sm_90a") == code


def test_what_keys_a_cubin(monkeypatch) -> None:
    variant = nvrtc.KernelVariant("align_scales.cu", (("Q2_POW2", 1),))
    path = nvrtc._cache_path(variant, "sm_100a")
    other = nvrtc.KernelVariant("align_scales.cu", (("Q2_POW2", 0),))
    assert nvrtc._cache_path(other, "sm_100a") != path
    assert nvrtc._cache_path(variant, "sm_103a") != path
    monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    assert nvrtc._cache_path(variant, "sm_100a") != path
    monkeypatch.undo()
    monkeypatch.setattr(nvrtc, "common_headers", lambda: {"formats.cuh": "// changed"})
    assert nvrtc._cache_path(variant, "sm_100a") != path


def test_an_unwritable_cache_costs_only_time(monkeypatch) -> None:
    monkeypatch.setenv("Q2COMPILE_CACHE_DIR", "/dev/null/nowhere")
    assert nvrtc.cubin(swizzle_launch().variant, "sm_90a")


def test_a_compilation_leaves_the_objects_of_python_alone() -> None:
    """Bytes of length one are objects that the whole process shares, and an empty log is one NUL:
    written into b" ", it made torch.load take each size of 32 (0x20) for 0."""
    _, log = nvrtc.compile_variant(swizzle_launch().variant, "sm_90a")
    assert log == ""
    assert [bytes([i])[0] for i in range(256)] == list(range(256))
    file, weight = io.BytesIO(), torch.ones(32)
    torch.save(weight, file)
    file.seek(0)
    assert torch.equal(torch.load(file), weight)


def test_a_wrong_layout_does_not_compile() -> None:
    good = align_launch(get_scheme("nvfp4_ms_eden_pow2"), True).variant
    defines = {**dict(good.defines), "Q2_PARAMS_BYTES": params_bytes("PPP")}
    with pytest.raises(nvrtc.CompileError, match="Params differs from its layout"):
        nvrtc.compile_variant(nvrtc.KernelVariant(good.file, tuple(defines.items())), "sm_90a")
