"""Calls of the rotating quantisers whose operand is computed in the kernel: of
q2::rht_quantize, q2::rht_quantize_both and q2::quantize_masked, x aside.

Of GPUs only an H200 has run them, so everywhere the first use of a scheme is preceded by a check
against the reference (`refusal`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.calls import At, Call, Ready, empty, tensors_of
from q2compile.runtime_kernels.cuda.jit import nvrtc
from q2compile.runtime_kernels.cuda.jit.launch import architecture
from q2compile.runtime_kernels.cuda.quantize.plan import (
    Direction,
    Produced,
    launches,
    quantizer_call,
)
from q2compile.runtime_kernels.cuda.quantize.producer import Producer
from q2compile.runtime_kernels.cuda.quantize.rotate_quantize import SOURCES, shared_memory
from q2compile.runtime_kernels.cuda.selfcheck import apart, difference_of_bits, judge
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

NAME = "fused"
# Where the scheme and the transform are among the arguments after x.
_HOW = {"rht_quantize": 1, "rht_quantize_both": 2, "quantize_masked": 0}
_VERDICTS: dict[tuple, str | None] = {}


def scheme_and_transform(op: str, args: Sequence[Any]) -> tuple[str, str]:
    """Of an op's arguments after x."""
    at = _HOW[op]
    return args[at], args[at + 1]


def fused_call(
    op: str,
    producer: Producer,
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    args: Sequence[Any],
) -> Call:
    """The launches of an op.

    inputs: the producer's, on 16 bytes.  sizes: the values of its sizes.
    args: of the op, after x. Tensors of the call: inputs, then those of args.
    """
    scheme, transform = scheme_and_transform(op, args)
    count = len(inputs)
    operands = count + len(tensors_of(args))
    fields: tuple[At | int, ...] = (*(At(i) for i in range(count)), *map(int, sizes))
    return quantizer_call(
        inputs[0].device.index,
        SOURCES[producer.dtype],
        get_scheme(scheme),
        get_transform(transform),
        (0, producer.height(sizes), producer.cols, 0, 0),
        _directions(op, args, count, operands),
        operands,
        operand=(0, 0, 0),
        produced=Produced(producer, fields),
    )


def _directions(
    op: str, args: Sequence[Any], count: int, operands: int
) -> tuple[Direction | None, Direction | None]:
    if op == "quantize_masked":
        return Direction(0, 0, operands), None
    if op == "rht_quantize":
        seed, _, _, transpose, stream = args
        along = Direction(0 if seed is None else At(count), stream, operands)
        return (None, along) if transpose else (along, None)
    row_seed, col_seed, *_, stream = args
    last = operands - 1
    along_rows = Direction(0 if row_seed is None else At(count), stream, operands)
    along_cols = Direction(0 if col_seed is None else At(last), stream, operands + 3)
    return along_rows, along_cols


def prepare(op: str, producer: Producer, args: Sequence[Any], index: int) -> None:
    """Has NVRTC begin with the kernels of such a call, while other things are compiled."""
    scheme, transform = scheme_and_transform(op, args)
    turned = _turned(op, args)
    along = (not turned, turned or op == "rht_quantize_both")
    for launch in launches(
        SOURCES[producer.dtype],
        get_scheme(scheme),
        get_transform(transform),
        along,
        room=shared_memory(index),
        vectors=True,
        amax_known=False,
        producer=producer,
    ):
        nvrtc.begin(launch.variant, architecture(index))


def _turned(op: str, args: Sequence[Any]) -> bool:
    """Whether along columns alone."""
    return op == "rht_quantize" and bool(args[3])


def refusal(op: str, index: int, args: Sequence[Any]) -> str | None:
    """None when kernels of an op with an expression in them may be used with the scheme and the
    transform of args on this CUDA device, otherwise the reason in words. The first time on a
    machine a small one runs, and must give the reference's bits: of sums and products, since those
    are what all devices round alike. The functions of libdevice it does not try."""
    device = torch.device("cuda", index)
    check = (op, NAME, device, *scheme_and_transform(op, args), _turned(op, args))
    if check not in _VERDICTS:
        judge(_VERDICTS, check, functools.partial(disagreement, op, device, args))
    return _VERDICTS[check]


def disagreement(op: str, device: torch.device, args: Sequence[Any]) -> str | None:
    """Runs a small producer of every kind of input through an op: None when the results have the
    reference's bits, otherwise how they differ. args: of the op; of its tensors only which there
    are counts."""
    with apart(device):
        inputs = representative_inputs()
        producer = representative()
        given = [torch.tensor(7 + i) if _is_tensor(a) else a for i, a in enumerate(args)]
        want = getattr(torch.ops.q2, op)(producer.evaluate(inputs), *given)
        on_device = [t.to(device) for t in inputs]
        given = [a.to(device) if _is_tensor(a) else a for a in given]
        call = fused_call(op, producer, on_device, (), given)
        outputs = [empty(o.shape, o.strides, o.dtype) for o in call.outputs]
        Ready(call, device.index)([*on_device, *tensors_of(given), *outputs])
        return difference_of_bits(op, outputs, want)


def _is_tensor(arg: Any) -> bool:
    """Or what stands for one: an open argument of a site, a node of Inductor's."""
    return isinstance(arg, torch.Tensor) or arg is ... or hasattr(arg, "get_size")


_ROWS, _COLS = 130, 264


@functools.cache
def representative() -> Producer:
    """((a + b) * row + c * column) where a mask holds, else 0; with additions and products alone,
    whose bits every device has."""
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
    )
    inputs = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32, torch.bool)
    return Producer(torch.bfloat16, str(_ROWS), _COLS, inputs, (), False, steps)


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
