# SPDX-License-Identifier: Apache-2.0
"""The patch "fakes": the cache keys of q2 ops' fakes, and that cached results are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.config
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from q2compile.runtime_kernels.numerics import layout
from q2compile.runtime_kernels.ops import quantize
from q2compile.torch_internals.patches import patched

SCHEME, TRANSFORM = "nvfp4_ms_eden", "rht128"


@pytest.fixture
def asked(monkeypatch) -> Iterator[Counter[str]]:
    """How often an operand is made anew, by scheme, while a graph of ours is compiled."""
    FakeTensorMode.cache_clear()
    counts: Counter[str] = Counter()
    make = layout.empty_quantized

    def counted(x, rows, contraction, scheme, transform):
        counts[scheme.name] += 1
        return make(x, rows, contraction, scheme, transform)

    monkeypatch.setattr(quantize, "empty_quantized", counted)
    with patched():
        yield counts


def both(x: torch.Tensor, scheme: str = SCHEME) -> tuple[torch.Tensor, ...]:
    seed = torch.empty((), dtype=torch.int64, device=x.device)
    return torch.ops.q2.quantize(
        x,
        scheme=scheme,
        transform=TRANSFORM,
        rowwise=True,
        columnwise=True,
        rowwise_seed=seed,
        columnwise_seed=seed,
    )


def test_alike_calls_ask_once(asked) -> None:
    with FakeTensorMode():
        first, again = both(torch.empty(256, 128)), both(torch.empty(256, 128))
    assert asked == {SCHEME: 2}  # one for each direction
    assert all(isinstance(made, FakeTensor) for made in again)
    for one, other in zip(first, again, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert one.device == other.device
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_calls_that_differ_ask_again(asked) -> None:
    with FakeTensorMode():
        both(torch.empty(256, 128))
        both(torch.empty(128, 256))
        both(torch.empty(256, 128, dtype=torch.bfloat16))
        both(torch.empty(128, 256).t())
        assert asked == {SCHEME: 8}
        dequantized = both(torch.empty(256, 128), SCHEME + "@bf16")
    assert asked == {SCHEME: 8, SCHEME + "@bf16": 2}
    assert dequantized[0].dtype == torch.bfloat16


def test_errors_are_raised_each_time(asked) -> None:
    with FakeTensorMode():
        for _ in range(2):
            with pytest.raises(ValueError, match="nvfp5"):
                both(torch.empty(256, 128), "nvfp5")


def test_symbolic_sizes(asked) -> None:
    """The symbols of the second graph are its own."""
    for _ in range(2):
        mode = FakeTensorMode(shape_env=ShapeEnv())
        x = mode.from_tensor(torch.empty(256, 128), static_shapes=False)
        with mode, enable_python_dispatcher():
            made = [both(x)[0] for _ in range(3)]
        assert all(codes.shape[0].node.shape_env is mode.shape_env for codes in made)
        assert len({str(codes.shape) for codes in made}) == 1
    assert asked == {SCHEME: 4}


def test_ops_that_write_are_not_remembered(asked) -> None:
    with FakeTensorMode():
        for _ in range(2):
            torch.ops.q2.note([torch.empty(4)], "here", "")
    assert FakeTensorMode.cache_info().bypasses["non-builtin"] > 0


@pytest.mark.usefixtures("fresh_compiler")
def test_what_is_remembered_is_what_they_return() -> None:
    """torch compares each cached result with the result of the fake."""
    hits = FakeTensorMode.cache_info().hits
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    options = {"inner": "eager", "strict": True}
    with torch._dynamo.config.patch(fake_tensor_cache_crosscheck_enabled=True):
        compiled = torch.compile(model, backend="quartet2", options=options)
        compiled(torch.ones(128, 64)).sum().backward()
    assert FakeTensorMode.cache_info().hits > hits


def test_outside_of_a_compilation_they_are_not_remembered(monkeypatch) -> None:
    FakeTensorMode.cache_clear()
    with FakeTensorMode():
        both(torch.empty(256, 128))
        both(torch.empty(256, 128))
    assert FakeTensorMode.cache_info().bypasses["non-builtin"] == 2
