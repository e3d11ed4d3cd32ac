"""Calls of the rotating quantisers whose operand is computed in the kernel: of
q2::rht_quantize, q2::rht_quantize_both and q2::quantize_masked, x aside. Two calls of one op whose
operands are made from the same tensors can be one, which reads those once. The same kernel computes
and quantises both halves of the operand of q2::rht_quantize_groups_both.

Of GPUs only an H200 has run them, so everywhere the first use of a scheme is preceded by a check
against the reference (`refusal`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from q2compile.runtime_kernels.cuda.agreements import Check, is_kept
from q2compile.runtime_kernels.cuda.calls import At, Call, Ready, empty, tensors_of
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
from q2compile.runtime_kernels.cuda.selfcheck import apart, difference_of_bits, judge
from q2compile.runtime_kernels.numerics.groups import padded_ends
from q2compile.runtime_kernels.numerics.schemes import get_scheme
from q2compile.runtime_kernels.numerics.transforms import get_transform

NAME = "fused"
# Where the scheme and the transform are among the arguments after x.
_HOW = {"rht_quantize": 1, "rht_quantize_both": 2, "quantize_masked": 0}
_HOW |= {"rht_quantize_groups_both": 4}
_OUTPUTS = {"rht_quantize": 3, "rht_quantize_both": 6, "quantize_masked": 4}
_OUTPUTS |= {"rht_quantize_groups_both": 6}
_BOTH = ("rht_quantize_both", "rht_quantize_groups_both")
_VERDICTS: dict[tuple, str | None] = {}


def scheme_and_transform(op: str, args: Sequence[Any]) -> tuple[str, str]:
    """Of an op's arguments after x."""
    at = _HOW[op]
    return args[at], args[at + 1]


def no_pair(op: str, producer: Producer, args: Sequence[Any], index: int) -> str | None:
    """None where one kernel may quantise both matrices of a producer like this with the scheme of
    args on this CUDA device, otherwise the reason in words."""
    spec = get_scheme(scheme_and_transform(op, args)[0])
    if Rule.of(spec) not in SCALED_AFTERWARDS:
        # MX spills registers; EXACT has a unit for each operand, of a pass that is not written.
        return f"two operands of {spec.name} are not quantised by one kernel"
    along_rows = not _turned(op, args)
    if not has_room_for_two(SOURCES[producer.dtype], spec, along_rows, shared_memory(index)):
        return f"tiles of two {producer.dtype} operands do not fit into shared memory"
    return None


def fused_call(
    op: str,
    producer: Producer,
    inputs: Sequence[torch.Tensor],
    sizes: Sequence[int],
    calls: Sequence[Sequence[Any]],
) -> Call:
    """The launches of an op.

    inputs: the producer's, on 16 bytes.  sizes: the values of its sizes.
    calls: for each of its matrices the args of the op, after x; two have the same scheme and the
        same transform. Tensors of the call: inputs, then those of calls.
    """
    assert not producer.halves or producer.cols % TILE == 0, "a tile lies in one half"
    scheme, transform = scheme_and_transform(op, calls[0])
    count = len(inputs)
    operands = count + sum(len(tensors_of(args)) for args in calls)
    directions: list[Direction | None] = []
    tensor, output = count, operands
    for args in calls:
        directions += _directions(op, args, tensor, output)
        tensor += len(tensors_of(args))
        output += _OUTPUTS[op]
    fields: tuple[At | int, ...] = (*(At(i) for i in range(count)), *map(int, sizes))
    groups = None
    if _is_grouped(op):  # its first two arguments
        groups = Groups(At(count), At(count + 1), calls[0][0].shape[0])
    return quantizer_call(
        inputs[0].device.index,
        SOURCES[producer.dtype],
        get_scheme(scheme),
        get_transform(transform),
        (0, producer.height(sizes), producer.cols, 0, 0),
        directions,
        operands,
        operand=(0, 0, 0),
        groups=groups,
        produced=Produced(producer, fields),
    )


def _directions(
    op: str, args: Sequence[Any], tensor: int, output: int
) -> tuple[Direction | None, Direction | None]:
    """tensor, output: the first ones of args, and of their call."""
    if op == "quantize_masked":
        return Direction(0, 0, output), None
    if op == "rht_quantize":
        seed, _, _, transpose, stream = args
        along = Direction(0 if seed is None else At(tensor), stream, output)
        return (None, along) if transpose else (along, None)
    row_seed, col_seed, *_, stream = args
    if _is_grouped(op):
        row_seed, col_seed = args[2:4]
        tensor += 2
    seeds = [0 if row_seed is None else At(tensor), 0]
    if col_seed is not None:
        seeds[1] = At(tensor + (row_seed is not None))
    return Direction(seeds[0], stream, output), Direction(seeds[1], stream, output + 3)


def prepare(op: str, producer: Producer, args: Sequence[Any], index: int) -> None:
    """Has NVRTC begin with the kernels of such a call, while other things are compiled."""
    scheme, transform = scheme_and_transform(op, args)
    turned = _turned(op, args)
    along = (not turned, turned or op in _BOTH)
    for launch in launches(
        SOURCES[producer.dtype],
        get_scheme(scheme),
        get_transform(transform),
        along,
        room=shared_memory(index),
        vectors=True,
        amax_known=False,
        grouped=_is_grouped(op),
        producer=producer,
    ):
        nvrtc.begin(launch.variant, architecture(index))


def _is_grouped(op: str) -> bool:
    return "_groups" in op


def directions(op: str) -> int:
    """Along which a call quantises."""
    return 2 if op in _BOTH else 1


def _turned(op: str, args: Sequence[Any]) -> bool:
    """Whether along columns alone."""
    return op == "rht_quantize" and bool(args[3])


def refusal(op: str, index: int, args: Sequence[Any], operands: int = 1) -> str | None:
    """None when kernels of an op with an expression in them may be used with the scheme and the
    transform of args on this CUDA device, otherwise the reason in words. The first time on a
    machine a small one runs, and must give the reference's bits: of sums and products, since those
    are what all devices round alike. The functions of libdevice it does not try.

    operands: that one kernel computes and quantises.
    """
    check = _check(op, index, args, operands)
    if check not in _VERDICTS:
        device = torch.device("cuda", index)
        judge(_VERDICTS, check, functools.partial(disagreement, op, device, args, operands))
    return _VERDICTS[check]


def begin(op: str, index: int, args: Sequence[Any], operands: int = 1) -> None:
    """Has threads compile what that check launches, if it is still to come."""
    check, producer = _check(op, index, args, operands), representative(operands, _is_grouped(op))
    known = check in _VERDICTS or is_kept(check)
    if not known and (operands == 1 or no_pair(op, producer, args, index) is None):
        prepare(op, producer, args, index)


def _check(op: str, index: int, args: Sequence[Any], operands: int) -> Check:
    how = (*scheme_and_transform(op, args), _turned(op, args))
    return op, NAME, torch.device("cuda", index), *how, operands


def disagreement(
    op: str, device: torch.device, args: Sequence[Any], operands: int = 1
) -> str | None:
    """Runs a small producer of every kind of input through an op: None when the results have the
    reference's bits, otherwise how they differ. args: of the op; of its tensors only which there
    are counts."""
    with apart(device):
        inputs = representative_inputs()
        producer = representative(operands, _is_grouped(op))
        matrices = producer.evaluate(inputs)
        calls = [
            [torch.tensor(10 * n + i) if _is_tensor(a) else a for i, a in enumerate(args, 7)]
            for n in range(len(matrices))
        ]
        if _is_grouped(op):
            ends = torch.tensor([0, 70, 120], dtype=torch.int32)  # and rows of no group
            calls[0][:2] = ends, padded_ends(ends)
        quantise = getattr(torch.ops.q2, op)
        want = [r for x, given in zip(matrices, calls, strict=True) for r in quantise(x, *given)]
        on_device = [t.to(device) for t in inputs]
        calls = [[a.to(device) if _is_tensor(a) else a for a in given] for given in calls]
        call = fused_call(op, producer, on_device, (), calls)
        outputs = [empty(o.shape, o.strides, o.dtype) for o in call.outputs]
        seeds = [t for given in calls for t in tensors_of(given)]
        Ready(call, device.index)([*on_device, *seeds, *outputs])
        return difference_of_bits(op, outputs, want)


def _is_tensor(arg: Any) -> bool:
    """Or what stands for one: an open argument of a site, a node of Inductor's."""
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
