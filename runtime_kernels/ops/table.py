# SPDX-License-Identifier: Apache-2.0
"""The table of quantizing ops, and QuantizerCall, a call of one described by its arguments.

Passes, lowerings, kernels, self-checks, telemetry and reports ask this file about a quantizing op:
what it reads, which operands it makes, where their parts are among its outputs, which seed each of
them has. No other file lists these ops, or derives a meaning from the name of an op.

    call = QuantizerCall.of(QUANTIZE, args)
    call.columnwise, call.grouped, call.scheme.stochastic, call.operands[0].first
    call.replace(dbias=torch.bfloat16)        a call like it with other arguments
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as _replace
from typing import Any, NamedTuple

import torch

from q2compile.runtime_kernels.choice import kernels, ops
from q2compile.runtime_kernels.numerics.schemes import Scheme, get_scheme
from q2compile.runtime_kernels.numerics.transforms import Transform, get_transform
from q2compile.runtime_kernels.registry import (
    FUSED,
    INDUCTOR,
    REFERENCE,
    as_written,
    bound,
    parameters,
)

QUANTIZE, REQUANTIZE = "quantize", "requantize"
# The other ops that passes, lowerings and kernels look for.
DEQUANTIZE, TRANSPOSE, SPLIT_SCALES = "dequantize", "transpose", "split_scales"
AMAX, TO_E4M3 = "amax", "to_e4m3"
MASKED_UNROTATE, GEMM_MASKED_UNROTATE = "masked_unrotate", "gemm_masked_unrotate"
PADDED_ENDS, GATHER_ROWS, SEED = "padded_ends", "gather_rows", "seed"
GEMM, GROUPED_GEMM, GROUPED_MM = "gemm", "grouped_gemm", "grouped_mm"

PARTS = ("codes", "scales", "global scale")  # outputs of a quantizer, for each operand
MASK = 3  # the output that is the trust mask, of a call that has one


@dataclass(frozen=True)
class OpSpec:
    """A quantizing op. source: the arguments that it quantizes."""

    name: str
    source: tuple[str, ...]

    @property
    def overload(self) -> torch._ops.OpOverload:
        return getattr(torch.ops.q2, self.name).default


SPECS = {
    QUANTIZE: OpSpec(QUANTIZE, ("x",)),
    REQUANTIZE: OpSpec(REQUANTIZE, ("source", "scales", "global_scale")),
}


class QuantizedOperand(NamedTuple):
    """An operand that a call makes.

    columnwise  its blocks are along the columns of the source, else along the rows
    seed        of its signs and random bits, or None
    first       the output that is its codes; its scales and its global scale follow
    transform   its rotation
    """

    columnwise: bool
    seed: Any
    first: int
    transform: Transform

    @property
    def seed_name(self) -> str:
        """The argument that is the seed."""
        return "columnwise_seed" if self.columnwise else "rowwise_seed"


class QuantizerVariant(NamedTuple):
    """The properties that select the variant of a kernel, besides scheme and transform. One
    self-check covers all calls of a variant."""

    op: str
    rowwise: bool
    columnwise: bool
    rotated: bool
    masked: bool = False
    grouped: bool = False
    dbias: bool = False
    by_scales: bool = False
    rows_unrotated: bool = False  # columns alone are rotated

    def __str__(self) -> str:
        operands = ("rowwise",) * self.rowwise + ("columnwise",) * self.columnwise
        flags = ("rotated", "masked", "grouped", "dbias", "by_scales", "rows_unrotated")
        words = [name.replace("_", " ") for name in flags if getattr(self, name)]
        return " ".join((self.op, "+".join(operands), *words))


@dataclass(frozen=True)
class QuantizerCall:
    """A call of a quantizing op.

    args: all arguments by name, in the order of the schema. Tensors among them may be fakes, nodes
    of a graph, or Inductor's buffers.
    """

    spec: OpSpec
    args: Mapping[str, Any]

    @staticmethod
    def of(op: str, args: Sequence[Any]) -> QuantizerCall:
        """The call from args: all of the op's, in the order of its schema."""
        names = (name for name, _ in parameters(op))
        return QuantizerCall(SPECS[op], dict(zip(names, args, strict=True)))

    @staticmethod
    def named(op: str, **args: Any) -> QuantizerCall:
        """The call from the names of its arguments; those with a default may be left out."""
        return QuantizerCall.of(op, bound(op, (), args))

    def replace(self, **args: Any) -> QuantizerCall:
        """A copy of the call with other arguments."""
        unknown = args.keys() - self.args.keys()
        assert not unknown, f"q2::{self.spec.name} has no {unknown}"
        return _replace(self, args={**self.args, **args})

    @property
    def positional(self) -> tuple[Any, ...]:
        """All arguments, in the order of the schema."""
        return tuple(self.args.values())

    def written(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs as graphs have them, without those that have their default."""
        return as_written(self.spec.name, self.args)

    def __call__(self) -> list[torch.Tensor]:
        """Runs the call."""
        args, kwargs = self.written()
        return self.spec.overload(*args, **kwargs)

    # ---- what it reads ----

    @property
    def x(self) -> Any:
        """The source: a matrix, or its codes."""
        return self.args[self.spec.source[0]]

    @property
    def reads_codes(self) -> bool:
        return self.spec.name == REQUANTIZE and not self.by_scales

    @property
    def by_scales(self) -> bool:
        """Whether a matrix is rounded by given scales, then requantized."""
        return bool(self.args.get("by_scales"))

    @property
    def source_scheme(self) -> Scheme | None:
        """The scheme of the source's codes or scales; None for q2::quantize."""
        name = self.args.get("source_scheme")
        return None if name is None else get_scheme(name)

    # ---- what it makes ----

    @property
    def scheme(self) -> Scheme:
        return get_scheme(str(self.args["scheme"]))

    @property
    def transform(self) -> Transform:
        """The transform of its operands; the rowwise one may have none (`rotates_rows`)."""
        return get_transform(str(self.args["transform"]))

    @property
    def rotates_rows(self) -> bool:
        """Whether the transform is of a rowwise operand, too."""
        return bool(self.args.get("rotate_rows", True))

    @property
    def rowwise(self) -> bool:
        return bool(self.args.get("rowwise", False))

    @property
    def columnwise(self) -> bool:
        return bool(self.args.get("columnwise", True))

    @property
    def rotated(self) -> bool:
        return self.transform.size > 1

    @property
    def grouped(self) -> bool:
        """Whether rows are in groups, which are quantized separately columnwise."""
        return self.args["offs"] is not None

    @property
    def masked(self) -> bool:
        return bool(self.args.get("mask"))

    @property
    def dbias(self) -> torch.dtype | None:
        """The dtype of dbias, the sums of the columns; None without."""
        return self.args.get("dbias")

    @property
    def recorded(self) -> bool:
        return bool(self.args["recorded"])

    @property
    def draws(self) -> bool:
        """Whether it needs seeds."""
        return self.scheme.stochastic or self.transform.seeded

    @property
    def operands(self) -> tuple[QuantizedOperand, ...]:
        """The operands that it makes, in the order of the outputs: rowwise, columnwise."""
        found: list[QuantizedOperand] = []
        for columnwise in (False,) * self.rowwise + (True,) * self.columnwise:
            seed = self.args.get("columnwise_seed" if columnwise else "rowwise_seed")
            rotates = columnwise or self.rotates_rows
            transform = self.transform if rotates else get_transform("none")
            found.append(QuantizedOperand(columnwise, seed, len(PARTS) * len(found), transform))
        return tuple(found)

    def operand_of(self, output: int) -> QuantizedOperand:
        """The operand that an output is a part of."""
        return self.operands[output // len(PARTS)]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs; the statistics of each operand come last."""
        made = PARTS * len(self.operands) + ("mask",) * self.masked
        made += ("dbias",) * (self.dbias is not None)
        return made + ("statistics",) * (self.recorded * len(self.operands))

    @property
    def variant(self) -> QuantizerVariant:
        directions = self.rowwise, self.columnwise, self.rotated
        flags = self.masked, self.grouped, self.dbias is not None, self.by_scales
        return QuantizerVariant(self.spec.name, *directions, *flags, not self.rotates_rows)

    @property
    def label(self) -> str:
        """A short text of the call, for reports and notes."""
        return str(self.variant._replace(rotated=False))


def rowwise_call(scheme: str, x: Any = None, **args: Any) -> QuantizerCall:
    """A call of q2::quantize, rowwise and without a rotation."""
    return QuantizerCall.named(QUANTIZE, x=x, scheme=scheme, rowwise=True, columnwise=False, **args)


def kernel_names() -> tuple[str, ...]:
    """Names by which kernels can be disabled, alone and with their op."""
    pairs = [(op, k.name) for op in ops() for k in kernels(op) if k.name != REFERENCE]
    pairs += [(QUANTIZE, INDUCTOR), (QUANTIZE, FUSED)]
    return (*sorted({name for _, name in pairs}), *sorted(f"{op}.{name}" for op, name in pairs))
