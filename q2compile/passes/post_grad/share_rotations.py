# SPDX-License-Identifier: Apache-2.0
"""One rotated copy of an activation for the wgrads of all the linears it fed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

from q2compile.graph.nodes import GEMM_OPS, depending_on_tangents, outputs_of, producer, q2_nodes
from q2compile.graph.quantizers import quantizer_of, set_call


def share_rotations_pass(graph: fx.Graph) -> int:
    """The wgrads of q, k and v (of gate and up) rotate and quantize the same x, each under its own
    seed. With one seed, x is quantized once.

    before                                       after
        a = quantize(dy, columnwise, seed s)         a = quantize(dy, columnwise, seed s)
        b = requantize(*qx, seed s)                  b = requantize(*qx, seed s)
        gemm(*a, *b)                                 gemm(*a, *b)
        c = quantize(dz, columnwise, seed t)         c = quantize(dz, columnwise, seed s,
        d = requantize(*qx, seed t)                               rng_offset=2)
        gemm(*c, *d)                                 gemm(*c, *b)

    a and c may be rowwise, too. Their rowwise operand then has rng_offset 2 as well, under its own
    seed. b may be a quantize of a high-precision x.

    The random bits change; the distribution of each gradient does not. In every GEMM both operands
    have the signs of one seed, drawn in this step, and random bits of two rng_offsets. So (c, b) is
    distributed as (c, d) was, and so are the mean and the variance of its product. Gradients of
    different linears have different rng_offsets, so their random bits are independent.

    One thing is new: the errors of the weight gradients correlate, by x's part of them and as far
    as dy and dz are alike (equal signs rotate equal gradients to equal codes). The rows of one wide
    linear that computes q, k and v correlate in the same way. Nothing multiplies these errors: a
    weight gradient leaves the graph. A dgrad is different: a weight used twice in a row would meet
    its own error in a product, E[W̃ W̃] ≠ W W. So dgrads have their own seeds.

    Preconditions: gemms whose first operand is a gradient rotated along its columns and whose
    second are equal but for the seed; the shared seed stands before the other gradients' ops
    (merge_seeds puts all seeds up front, and pair_directions needs equal rng_offsets, so both run
    before this pass)."""
    return _share(graph, q2_nodes(graph, *GEMM_OPS))


def share_saved_rotations_pass(graph: fx.Graph) -> int:
    """Share the x that recipes such as nvfp4 rotate in the forward and save in that form. This runs
    before the partitioner, so that x is also saved once: 4.5 bits per element less for each linear
    that shares x.

    before, in the joint graph                   after
        b = quantize(x, columnwise, seed s)          b = quantize(x, columnwise, seed s)
        d = quantize(x, columnwise, seed t)
        a = quantize(dy, columnwise, seed s)         a = quantize(dy, columnwise, seed s)
        gemm(*a, *b)                                 gemm(*a, *b)
        c = quantize(dz, columnwise, seed t)         c = quantize(dz, columnwise, seed s,
        gemm(*c, *d)                                              rng_offset=2)
                                                     gemm(*c, *b)

    Sound as above. Precondition: the seed is drawn in the forward. Where it hangs on a gradient the
    other pass comes, after the partitioner and after gradients have been paired by their stream.
    """
    backward = depending_on_tangents(graph)
    made_in_forward = [
        gemm
        for gemm in q2_nodes(graph, *GEMM_OPS)
        if gemm in backward and producer(gemm.args[3]) not in backward  # type: ignore[arg-type]
    ]
    return _share(graph, made_in_forward)


def _share(graph: fx.Graph, gemms: Iterable[fx.Node]) -> int:
    shared: dict[Any, tuple[fx.Node, int]] = {}
    merged = 0
    for gemm in list(gemms):
        operands: Any = gemm.args
        a, b = producer(operands[0]), producer(operands[3])
        call = quantizer_of(b)
        if not _gradient_columns(gemm, a) or call is None or len(call.operands) > 1:
            continue
        if not (call.rotated or call.columnwise):
            continue
        seed = call.operands[0].seed
        seedless = call.replace(**{call.operands[0].seed_name: None})
        key = (b.target, *seedless.args.items())
        first, count = shared.setdefault(key, (b, 1))
        if seed is None or first is b:
            continue
        of_first = quantizer_of(first)
        assert of_first is not None
        shared_seed = of_first.operands[0].seed
        offset = call.args["rng_offset"] + count
        if not (shared_seed < a and _replace_seed(a, seed, shared_seed, offset)):
            continue
        shared[key] = (first, count + 1)
        _use_outputs_of(first, gemm, b)
        merged += 1
    if merged:
        graph.eliminate_dead_code()  # the other rotations of x, and their seeds
    return merged


def _gradient_columns(gemm: fx.Node, a: fx.Node) -> bool:
    """Whether the first operand is all of a gradient's column direction, used here alone."""
    call = quantizer_of(a)
    if call is None or call.source_scheme is not None or not call.columnwise:
        return False
    columns = [n for n in a.users if call.operand_of(n.args[1]).columnwise]  # type: ignore[arg-type]
    return gemm.args[0] in columns and all(list(n.users) == [gemm] for n in columns)


def _replace_seed(a: fx.Node, seed: fx.Node, shared: fx.Node, rng_offset: int) -> bool:
    """Let the gradient's op take the shared seed and an rng_offset of its own; False if it has not
    ``seed`` to begin with."""
    call = quantizer_of(a)
    if call is None or call.operands[-1].seed is not seed:
        return False
    set_call(a, call.replace(columnwise_seed=shared, rng_offset=rng_offset))
    return True


def _use_outputs_of(first: fx.Node, gemm: fx.Node, b: fx.Node) -> None:
    """Let ``gemm`` take its second operand from ``first`` instead of ``b``."""
    outputs = outputs_of(first)
    for old in gemm.args[3:6]:
        assert isinstance(old, fx.Node) and old.args[0] is b
        gemm.replace_input_with(old, outputs[old.args[1]])
