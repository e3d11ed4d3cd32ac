# SPDX-License-Identifier: Apache-2.0
"""Calls of q2::quantize whose operand is computed in the kernel. Two calls whose operands are made
from the same tensors can be one, which reads those once. The same kernel computes and quantizes
both halves of the operand of a call in groups.

A call is given by its keywords, all that q2::quantize takes but x.

Of GPUs only an H200 has run them, so everywhere the first use of a scheme is preceded by a check
against the reference (`refusal`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from q2compile.runtime_kernels.cuda import checks
from q2compile.runtime_kernels.cuda.calls import At, Call, Ready, empty
from q2compile.runtime_kernels.cuda.check_results import Request
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import architecture
from q2compile.runtime_kernels.cuda.quantize.plan import (
    Direction,
    Groups,
    Produced,
    launches,
    quantizer_call,
)
from q2compile.runtime_kernels.cuda.quantize.producer import Producer
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import (
    SOURCES,
    TILE,
    has_room_for_two,
    shared_memory,
)
from q2compile.runtime_kernels.cuda.quantize.rule import SCALED_AFTERWARDS, Rule
from q2compile.runtime_kernels.cuda.selfcheck import apart, difference_of_bits
from q2compile.runtime_kernels.numerics.groups import padded_ends
from q2compile.runtime_kernels.ops.table import QUANTIZE, QuantizerCall
from q2compile.runtime_kernels.registry import FUSED

Keywords = Mapping[str, Any]


def call_of(keywords: Keywords) -> QuantizerCall:
    """The call that these are of."""
    return QuantizerCall.named(QUANTIZE, x=None, **keywords)


def no_pair(producer: Producer, keywords: Keywords, index: int) -> str | None:
    """None where one kernel may quantize both matrices of a producer like this with the scheme of a
    call on this CUDA device, otherwise the reason in words."""
    call = call_of(keywords)
    if Rule.of(call.scheme) not in SCALED_AFTERWARDS:
        # MX spills registers; EXACT has a unit for each operand, of a pass that is not written.
        return f"two operands of {call.scheme.name} are not quantized by one kernel"
    room = shared_memory(index)
    if not has_room_for_two(SOURCES[producer.dtype], call.scheme, call.rowwise, room):
        return f"tiles of two {producer.dtype} operands do not fit into shared memory"
    return None


def fused_call(
    producer: Producer,
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    calls: Sequence[Keywords],
) -> Call:
    """The launches.

    inputs: the producer's, on 16 bytes.  sizes: the values of its sizes.
    calls: for each of its matrices; two have the same scheme and the same transform. Tensors of the
        result: inputs, then those of calls (`tensors_in`).
    """
    assert not producer.halves or producer.cols % TILE == 0, "a tile lies in one half"
    count = len(inputs)
    operands = count + sum(len(tensors_in(keywords)) for keywords in calls)
    directions: list[Direction | None] = []
    places: dict[str, At] = {}
    tensor, output = count, operands
    for call in map(call_of, calls):
        given = [name for name, arg in call.args.items() if isinstance(arg, torch.Tensor)]
        places = {name: At(tensor + i) for i, name in enumerate(given)}
        found: list[Direction | None] = [None, None]
        for operand in call.operands:
            seed = places.get(operand.seed_name, 0)
            made = Direction(seed, call.args["rng_offset"], output + operand.first)
            found[operand.columnwise] = made
        directions += found
        tensor += len(given)
        output += len(call.outputs)
    fields: tuple[At | int, ...] = (*(At(i) for i in range(count)), *map(int, sizes))
    groups = None
    if call.grouped:
        groups = Groups(places["offs"], places["padded_offs"], call.args["offs"].shape[0])
    return quantizer_call(
        inputs[0].device.index,
        SOURCES[producer.dtype],
        call.scheme,
        call.transform,
        (0, producer.height(sizes), producer.cols, 0, 0),
        directions,
        operands,
        operand=(0, 0, 0),
        groups=groups,
        produced=Produced(producer, fields),
    )


def tensors_in(keywords: Keywords) -> list[Any]:
    """The tensors that a call is given beside x, and what stands for one, in the order of the op's
    schema."""
    return [arg for arg in call_of(keywords).args.values() if _is_tensor(arg)]


def prepare(producer: Producer, keywords: Keywords, index: int) -> list[Future]:
    """Has NVRTC begin with the kernels of such a call, while other things are compiled."""
    call = call_of(keywords)
    needed = launches(
        SOURCES[producer.dtype],
        call.scheme,
        call.transform,
        (call.rowwise, call.columnwise),
        room=shared_memory(index),
        vectors=True,
        amax_known=False,
        grouped=call.grouped,
        producer=producer,
    )
    return [nvrtc.begin(launch.variant, architecture(index)) for launch in needed]


def refusal(index: int, keywords: Keywords, operands: int = 1) -> str | None:
    """None when kernels with an expression in them may be used with such a call on this CUDA
    device, otherwise the reason in words. The first time on a machine a small one runs, and must
    give the reference's bits: of sums and products, since those are what all devices round alike.
    The functions of libdevice it does not try.

    operands: that one kernel computes and quantizes.
    """
    return checks.refusal(_request(index, keywords, operands))


def begin(index: int, keywords: Keywords, operands: int = 1) -> None:
    """Has that check run, if it is still to come, and threads compile what it launches."""
    request = _request(index, keywords, operands)
    producer = representative(operands, call_of(keywords).grouped)
    one_or_fits = operands == 1 or no_pair(producer, keywords, index) is None
    if one_or_fits and not checks.is_known(request):
        checks.begin(request, prepare(producer, keywords, index))


def _request(index: int, keywords: Keywords, operands: int) -> Request:
    call, device = call_of(keywords), torch.device("cuda", index)
    how = call.scheme.name, call.transform.name, call.variant
    plain = {name: ... if _is_tensor(arg) else arg for name, arg in keywords.items()}
    return Request((QUANTIZE, FUSED, device, *how, operands), __name__, (device, plain, operands))


def disagreement(device: torch.device, keywords: Keywords, operands: int = 1) -> str | None:
    """Runs a small producer of every kind of input through the op: None when the results have the
    reference's bits, otherwise how they differ. keywords: of their tensors only which there are
    counts."""
    like = call_of(keywords)
    with apart(device):
        inputs = representative_inputs()
        producer = representative(operands, like.grouped)
        matrices = producer.evaluate(inputs)
        calls = [
            {
                name: torch.tensor(10 * n + i) if _is_tensor(arg) else arg
                for i, (name, arg) in enumerate(keywords.items(), 7)
            }
            for n in range(len(matrices))
        ]
        if like.grouped:
            ends = torch.tensor([0, 70, 120], dtype=torch.int32)  # and rows of no group
            calls[0] |= {"offs": ends, "padded_offs": padded_ends(ends)}
        quantize = like.spec.overload
        want = [r for x, given in zip(matrices, calls, strict=True) for r in quantize(x, **given)]
        on_device = [t.to(device) for t in inputs]
        calls = [
            {name: arg.to(device) if _is_tensor(arg) else arg for name, arg in given.items()}
            for given in calls
        ]
        call = fused_call(producer, on_device, (), calls)
        outputs = [empty(o.shape, o.strides, o.dtype) for o in call.outputs]
        seeds = [t for given in calls for t in tensors_in(given)]
        Ready(call, device.index)([*on_device, *seeds, *outputs])
        return difference_of_bits(outputs, want, like.outputs * len(matrices))


def _is_tensor(arg: Any) -> bool:
    """Or what stands for one: an open argument of a call site, a node of Inductor's."""
    return isinstance(arg, torch.Tensor) or arg is ... or hasattr(arg, "get_size")


_ROWS, _COLS = 130, 264


@functools.cache
def representative(operands: int = 1, halves: bool = False) -> Producer:
    """((a + b) * row + c * column) where a mask holds, else 0; with additions and products alone,
    whose bits every device has. The second is the difference of the two. halves: of whole tiles."""
    index = f"{_COLS}*r + c"
    steps = (
        ("load", 0, index, "lanes", -1),
        ("load", 1, index, "lanes", -1),
        ("add", 0, 1),
        ("load", 2, "c", "lanes", -1),
        ("mul", 2, 3),
        ("load", 3, "r", "one", -1),
        ("index", "c", "first"),
        ("constant", "128", "int"),
        ("lt", 6, 7),
        ("load", 0, index, "lanes", 8),
        ("mul", 9, 5),
        ("add", 4, 10),
        ("load", 4, index, "lanes", -1),
        ("constant", "0x0.0p+0", "float"),
        ("where", 12, 11, 13),
        ("sub", 4, 10),
    )
    inputs = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bool)
    results = (14, 15)[:operands]
    cols = 2 * TILE if halves else _COLS
    return Producer(torch.bfloat16, str(_ROWS), cols, inputs, (), False, steps, results, halves)


def representative_inputs() -> list[torch.Tensor]:
    """On the CPU."""
    generator = torch.Generator("cpu").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    matrix = (_ROWS, _COLS)
    return [
        *(normal(*matrix).bfloat16(), normal(*matrix), normal(_COLS).bfloat16(), normal(_ROWS)),
        normal(*matrix) > -1,
    ]
