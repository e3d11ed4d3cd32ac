# SPDX-License-Identifier: Apache-2.0
"""Inductor: compiling with settings of our own, its options, and its slots for passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass

from q2compile.errors import BackendError, ConfigError, one_of, shown
from q2compile.torch_internals.dynamo import kept


def check_inductor_option(key: object, value: object) -> None:
    """Raises ConfigError unless Inductor's config knows ``key``, and ``value`` is of its type.

    A type that torch writes down only as text takes everything, and so does one that it knows from
    a default of None alone.
    """
    from torch._inductor import config, list_options

    listed_by = "torch._inductor.list_options()"
    name = one_of("setting of Inductor in 'inductor':", key, list_options(), listed_by)
    allowed: Any = config.get_type(name)  # type: ignore[attr-defined]
    if allowed is not NoneType and not _is_of_type(value, allowed):
        kind = getattr(allowed, "__name__", allowed) if isinstance(allowed, type) else allowed
        raise ConfigError(f"inductor: {name} got {shown(value)}; allowed: {kind}")


def _is_of_type(value: object, annotation: Any) -> bool:
    """Whether ``value`` fits a type annotation, as deep as its outermost container."""
    origin = get_origin(annotation)
    if origin is Literal:
        return any(
            value is one or type(value) is type(one) and value == one
            for one in get_args(annotation)
        )
    if origin in (Union, UnionType):
        return any(_is_of_type(value, one) for one in get_args(annotation))
    if annotation is float:
        return isinstance(value, float | int)
    kind = annotation if origin is None else origin
    return isinstance(value, kind) if isinstance(kind, type) else True


def in_memory() -> Any:
    """The op that has Inductor put a tensor into memory: of it and its strides, that tensor."""
    from torch._inductor.inductor_prims import force_stride_order

    return force_stride_order


def inductor_options_of_mode(mode: str | None, dynamic: bool | None = None) -> dict[str, Any]:
    """Inductor's config for a mode of torch.compile. Raises ConfigError for an unknown one."""
    from torch._inductor import list_mode_options

    if mode is None:
        return {}
    allowed = dict.fromkeys(["default", *list_mode_options(dynamic=dynamic)])
    mode = one_of("mode", mode, allowed)
    return {} if mode == "default" else dict(list_mode_options(mode, dynamic))


SHORT_SUM = 10  # elements


def short_sums_unrolled() -> dict[str, Any]:
    """Config by which a sum of up to SHORT_SUM numbers, of the experts of a token, is computed as a
    sum and not as a reduction, unless the user has set another length.

    As a reduction over rows Inductor has it read 32 columns of each at a time: for 8 rows of
    [8192, 2048] each 440 us on an H200 and 33 for the RMSNorm behind it. Unrolled they are one
    kernel, 130 us (torch 2.11).
    """
    from torch._inductor import config

    usual = config.unroll_reductions_threshold == 8
    return {"unroll_reductions_threshold": SHORT_SUM + 1} if usual else {}


def inductor_compile(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    settings: Mapping[str, Any],
    on_output_code: Callable[[fx.GraphModule, str], None] | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    on_again: Callable[[fx.GraphModule], None] = lambda graph: None,
) -> Callable[..., Any]:
    """Inductor's compile_fx under ``settings``, never touching its global config.

    on_output_code: called with each compiled graph and its generated source. Only pass it with the
        FX graph cache off: a hit generates nothing.
    within: entered while Inductor works on this graph: now, and again when it compiles the backward
        in its first call, long after this function has returned and maybe in another thread. Both
        go through inner_compile, around which compile_fx itself puts its config for that reason.
        If what it yields is not empty at the end, the graph is compiled again.
    on_again: called with a graph that is compiled again.
    """
    from torch._guards import TracingContext
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.exc import InductorError

    def inner(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        as_it_came, rejected = kept(graph), None
        while True:
            try:
                with within() as rejected:
                    code = compile_fx_inner(graph, inputs, **kwargs)
            except Exception as error:
                # With the cache off Inductor wraps what a pass raises.
                own = error.inner_exception if isinstance(error, InductorError) else None
                if isinstance(own, BackendError):
                    raise own from own.__cause__
                if not rejected:
                    raise
            if not rejected:
                break
            on_again(graph)
            graph = as_it_came()
            if (context := TracingContext.try_get()) and context.output_strides:
                context.output_strides.clear()  # of the code that is not used
        if on_output_code is not None:
            on_output_code(graph, getattr(code, "source_code", ""))
        return code

    plain = on_output_code is None and within is nullcontext
    compile_one = compile_fx_inner if plain else inner
    with within():
        compiled: Any = compile_fx(
            gm, example_inputs, inner_compile=compile_one, config_patches=dict(settings)
        )
    return compiled


def compile_by_itself(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A graph as Inductor compiles it, without the passes, caches and CUDA graphs of the caller's
    config."""
    from torch._inductor import compile as compile_graph
    from torch._inductor import list_options

    own = {
        "fx_graph_cache": False,
        "cpp_wrapper": False,
        "max_autotune": False,
        "max_autotune_pointwise": False,
        "coordinate_descent_tuning": False,
        "triton.cudagraphs": False,
    }
    passes = [name for name in list_options() if name.endswith("_pass") and "custom" in name]
    options = {**own, **dict.fromkeys(passes)}
    compiled: Callable[..., Any] = compile_graph(gm, inputs, options=options)
    return compiled


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions of the graphs that Inductor compiles."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def lower(gm: fx.GraphModule) -> None:
    """Lowers a graph after all passes, as a compilation does, and generates no code: lowerings ask
    which kernels run."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    for node in gm.graph.find_nodes(op="placeholder"):
        if "val" not in node.meta:  # an argument that is None
            gm.graph.erase_node(node)
    gm.recompile()
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    lowering = GraphLowering(gm, inputs)
    with V.set_fake_mode(inputs[0].fake_mode), V.set_graph_handler(lowering):
        lowering.run(*inputs)


PASS_SLOT = "post_grad_custom_pre_pass"  # 2.11 takes one pass, 2.13 also a list
JOINT_PASS_SLOT = "joint_custom_post_pass"


def pass_in_slot(slot: str = PASS_SLOT) -> Any:
    """The pass that Inductor's global config has in a slot of ours, or None.

    Raises ConfigError for a list of more than one (possible from 2.13 on): there is one slot before
    ours."""
    from torch._inductor import config

    current = getattr(config, slot)
    if isinstance(current, list | tuple):
        if len(current) > 1:
            raise ConfigError(
                f"torch._inductor.config.{slot} holds {len(current)} passes, and only one can run "
                "before q2compile's; combine them into one CustomGraphPass"
            )
        current = current[0] if current else None
    return current
