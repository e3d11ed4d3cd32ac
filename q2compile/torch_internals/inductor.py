"""Where the package stands on internals of Dynamo, AOTAutograd and Inductor, and what differs in
them between torch 2.11 and 2.13. A new torch version is checked here first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from q2compile.errors import BackendError, ConfigError
from q2compile.suggest import one_of

# Whether a compiled graph gives the right gradient to an input that is an AsyncCollectiveTensor. It
# does in 2.11; in 2.13 backward fails in DTensor's redistribute. 2.12 was not tried.
ASYNC_INPUTS_KEEP_GRADIENTS = torch.__version__ < "2.12"


def inductor_options() -> set[str]:
    """The keys that Inductor's config knows."""
    from torch._inductor import list_options

    return set(list_options())


def inductor_options_of_mode(mode: str | None, dynamic: bool | None = None) -> dict[str, Any]:
    """Inductor's config for a mode of torch.compile. Raises ConfigError for an unknown one."""
    from torch._inductor import list_mode_options

    if mode is None or mode == "default":
        return {}
    modes = list_mode_options(dynamic=dynamic)
    if mode not in modes:
        one_of("mode", mode, ["default", *modes])
    return dict(list_mode_options(mode, dynamic))


def inductor_compile(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    patches: Mapping[str, Any],
    on_output_code: Callable[[fx.GraphModule, str], None] | None = None,
) -> Callable[..., Any]:
    """Inductor's compile_fx under ``patches``, never touching its global config.

    on_output_code: called with each compiled graph and its generated source. Only pass it with the
    FX
        graph cache off: a wrapped inner_compile is not something that torch's caches know.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.exc import InductorError

    from q2compile import lowering

    lowering.register()
    compiled: Any
    if on_output_code is None:
        compiled = compile_fx(gm, example_inputs, config_patches=dict(patches))
        return compiled

    def inner(graph: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        try:
            code = compile_fx_inner(graph, inputs, **kwargs)
        except InductorError as error:  # with the cache off Inductor wraps what a pass raises
            if isinstance(error.inner_exception, BackendError):
                raise error.inner_exception from error.inner_exception.__cause__
            raise
        on_output_code(graph, getattr(code, "source_code", ""))
        return code

    compiled = compile_fx(gm, example_inputs, inner_compile=inner, config_patches=dict(patches))
    return compiled


def aot_eager_compile(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    on_graph: Callable[[fx.GraphModule], None],
    on_joint: Callable[[fx.Graph], None] | None = None,
) -> Callable[..., Any]:
    """AOTAutograd with Inductor's decompositions and partitioner, run without Inductor.

    on_graph: called with the forward and the backward graph before they are run.
    on_joint: called with both in one, before the partitioner.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def compiler(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        on_graph(graph)
        graph.recompile()
        return make_boxed_func(graph.forward)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if on_joint is not None:
            on_joint(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )(gm, example_inputs)


def backward_at_once(wanted: bool) -> AbstractContextManager[None]:
    """If ``wanted``, AOTAutograd compiles a backward together with its forward; else it waits for
    the first call, when the forward has run and can't be replaced any more.
    """
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True) if wanted else nullcontext()


def control_flow() -> tuple[type[BaseException], ...]:
    """What Dynamo raises through a backend to trace again, or to leave a frame alone."""
    from torch._dynamo import exc

    return (
        exc.RestartAnalysis,
        exc.SkipFrame,
        exc.Unsupported,
        *exc.exceptions_allowed_to_be_fallback,
    )


def compile_id() -> str:
    """Dynamo's number of the graph that is compiled now, as in its logs: "0/0"."""
    return str(torch._guards.CompileContext.current_compile_id())


def graph_kind(graph: fx.Graph) -> str:
    """ "backward" if AOTAutograd's partitioner made this graph the backward one, or compiled
    autograd took it over, else "forward".

    The partitioner names the incoming gradients tangents_1, tangents_2, ...; forward and inference
    graphs have none.
    """
    if in_compiled_autograd():
        return "backward"
    for node in graph.nodes:
        if node.op != "placeholder":
            break
        if node.name.startswith("tangents"):
            return "backward"
    return "forward"


def in_compiled_autograd() -> bool:
    """Whether what is compiled now is the backward of earlier graphs, in compiled autograd."""
    from torch._dynamo import compiled_autograd

    return compiled_autograd.in_compiled_autograd_region


def parameter_of(node: fx.Node) -> torch.nn.Parameter | None:
    """The parameter behind a placeholder of a Dynamo graph, None if it stands for something
    else. A tensor that torch.func.functional_call puts in a parameter's place is one too.
    """
    arg = node.meta.get("grapharg")
    if arg is None:
        return None
    try:
        example = arg.example
    except AssertionError:  # the example was a temporary that is gone: no parameter
        return None
    stands_in = isinstance(example, torch.Tensor) and "._parameters['" in source_text(arg)
    return example if isinstance(example, torch.nn.Parameter) or stands_in else None


def source_text(grapharg: Any) -> str:
    """Where Dynamo found an input: L['self']._modules['up']._parameters['weight']."""
    name = grapharg.source.name
    return name if isinstance(name, str) else name()


def carry_sources(dynamo: fx.GraphModule, copy: fx.GraphModule) -> None:
    """Give a copy of Dynamo's graph what AOTAutograd reads off it and copying loses: where each
    input comes from, by which static inputs of CUDA graphs are known, too. A graph that is not
    Dynamo's has neither.
    """
    names = [graph.graph.find_nodes(op="placeholder") for graph in (dynamo, copy)]
    for original, node in zip(*names, strict=True):
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    if hasattr(dynamo, "_param_name_to_source"):
        copy._param_name_to_source = dynamo._param_name_to_source


PASS_SLOT = "post_grad_custom_pre_pass"
JOINT_PASS_SLOT = "joint_custom_post_pass"


def pass_slot(manager: CustomGraphPass) -> dict[str, Any]:
    """The patch that runs ``manager`` over post-grad graphs. 2.11 takes one pass, 2.13 also a
    list.
    """
    return {PASS_SLOT: manager}


def pass_in_slot(slot: str = PASS_SLOT) -> Any:
    """The pass that Inductor's global config has in a slot of ours, or None.

    Raises ConfigError for a list of several (possible from 2.13 on): there is one place before
    ours.
    """
    from torch._inductor import config

    current = getattr(config, slot)
    if isinstance(current, list | tuple):
        if len(current) > 1:
            raise ConfigError(
                f"torch._inductor.config.{slot} holds {len(current)} passes; one can run "
                "before q2compile's: combine them into one CustomGraphPass"
            )
        current = current[0] if current else None
    return current
