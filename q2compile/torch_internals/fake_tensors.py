"""Fakes: what a call of an op returns is known from one that was alike."""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode


@functools.cache
def remember_fakes(namespace: str) -> None:
    """Let torch keep what the fakes of a namespace's ops return, by what the operands are, as it
    does for ops of its own. It leaves out all others, whose fakes might look at more than that.

    Ours look at sizes, strides, types, devices and the other arguments, and return new tensors. A
    linear layer has some 40 calls of them from the first trace to the last pass, each of up to
    seven tensors made by a dispatch of its own: of the pair that quantises a gradient 0.7 ms, and
    0.2 when it is known (torch 2.13, one core).

    A torch that is not built so works as it does.
    """
    with suppress(AttributeError):
        validate = FakeTensorMode._validate_cache_key

        @functools.wraps(validate)
        def validate_others(self: Any, func: Any, *args: Any, **kwargs: Any) -> None:
            if getattr(func, "namespace", None) != namespace or func._schema.is_mutable:
                validate(self, func, *args, **kwargs)

        FakeTensorMode._validate_cache_key = validate_others  # type: ignore[method-assign]
