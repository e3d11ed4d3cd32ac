# SPDX-License-Identifier: Apache-2.0
"""AOTAutograd: compiling without Inductor, and which of its graphs is which."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx

from q2compile.torch_internals.dynamo import called_graphs


def aot_eager_compile(
    gm: fx.GraphModule,
    example_inputs: list[Any],
    on_graph: Callable[[fx.GraphModule], None],
    on_joint: Callable[[fx.Graph], None] | None = None,
    partitioner: Callable[..., Any] | None = None,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Callable[..., Any]:
    """AOTAutograd with Inductor's decompositions and partitioner, run without Inductor.

    on_graph: called with the forward and the backward graph before they are run, and with the
        graphs that these call before that.
    on_joint: called with both in one, before the partitioner.
    partitioner: cuts it; None: as torch's own does.
    within: see `inductor.inductor_compile`.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    cut = partitioner or min_cut_rematerialization_partition

    def compiler(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with within():
            for called in called_graphs(graph):
                on_graph(called)
                called.recompile()
        return make_boxed_func(graph.forward)

    def backward_compiler(graph: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiler(graph, inputs)

        def forward(*args: Any) -> Any:
            # Autocast's casts are in the graph. AOTAutograd disables it around the backward only
            # where the forward was compiled under autocast.
            with torch._C._DisableAutocast():
                return graph.forward(*args)

        return make_boxed_func(forward)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if on_joint is not None:
            on_joint(joint.graph)
        return cut(joint, *args, **kwargs)

    backend = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=backward_compiler,
        inference_compiler=compiler,
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    with within():
        return backend(gm, example_inputs)


def backward_at_once(wanted: bool) -> AbstractContextManager[None]:
    """If ``wanted``, AOTAutograd compiles a backward together with its forward; else it waits for
    the first call, when the forward has run and can't be replaced any more.
    """
    from torch._functorch import config

    return config.patch(force_non_lazy_backward_lowering=True) if wanted else nullcontext()


def compiles_buckets() -> bool:
    """Whether DDPOptimizer has the parts of a graph compiled now, one for each of DDP's buckets. It
    counts the backwards that are compiled later, and expects one for each part.
    """
    from torch._guards import TracingContext

    return getattr(TracingContext.try_get(), "ddp_optimizer_ctx", None) is not None


def compiles_ahead_of_time() -> bool:
    """Whether ``torch.compile(...).aot_compile`` has a function compiled, always in one graph. It
    takes from a backend what AOTAutograd and Inductor made, which can be saved, and no other
    callable.
    """
    from torch._functorch import config

    return bool(config.bypass_autograd_cache_key)


def backward_node(outputs: Any) -> Any:
    """The node of autograd's graph that runs the compiled backward of a call with these outputs;
    None if there is none.
    """
    for output in outputs if isinstance(outputs, list | tuple) else (outputs,):
        node = getattr(output, "grad_fn", None)
        for _ in range(4):  # views of outputs are recreated outside of it
            if node is None or type(node).__name__ == "CompiledFunctionBackward":
                break
            node = next((n for n, _ in node.next_functions if n is not None), None)
        else:
            node = None
        if node is not None:
            return node
    return None


def computes_again() -> bool:
    """Whether a checkpointed region is computed a second time now, for its backward. In the older,
    reentrant kind of checkpoint it is not: there this is the only time with gradients.
    """
    if torch._C._current_graph_task_id() == -1:  # autograd runs no backward on this thread
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def calls_on_fakes() -> bool:
    """Whether this call computes nothing. DDPOptimizer calls what it has had compiled for each of
    DDP's buckets once with fake tensors, to learn the strides of the outputs."""
    from torch._guards import active_fake_mode

    return active_fake_mode() is not None


@contextmanager
def checkpoints_left_on_error() -> Iterator[None]:
    """Make an error inside leave the checkpoints that it is raised in. In torch 2.12 it does not
    (2.13 fixed it): a checkpoint enters its modes in a generator, which the error's traceback keeps
    alive, and what is compiled next is compiled in those modes.
    """
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    depth = len(_get_current_dispatch_mode_stack())
    try:
        yield
    except Exception as error:
        raised: BaseException | None = error
        while raised is not None and len(_get_current_dispatch_mode_stack()) > depth:
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__cause__ or raised.__context__
        raise


def graph_kind(graph: fx.Graph) -> str:
    """ "backward" if this graph belongs to a backward that is compiled now, else "forward".

    AOTAutograd says which it hands to the compiler. That holds for the graphs inside of it, too: a
    branch of torch.cond has no names that would tell. A graph that is not AOTAutograd's is known by
    the partitioner's names for incoming gradients, tangents_1, tangents_2, ..., and what compiled
    autograd takes over is a backward.
    """
    from torch._functorch.aot_autograd import get_aot_compilation_context

    if in_compiled_autograd():
        return "backward"
    compiling, *_ = get_aot_compilation_context()  # ["0_backward"]
    for kind in ("backward", "forward", "inference"):
        if any(name.endswith(f"_{kind}") for name in compiling):
            return "backward" if kind == "backward" else "forward"
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


def compiles_autograd() -> bool:
    """Whether compiled autograd takes over the backward of what runs now."""
    from torch._dynamo import compiled_autograd, config

    return bool(config.compiled_autograd or compiled_autograd.compiled_autograd_enabled)


@contextmanager
def layouts_without_guards(*sizes: Any) -> Iterator[None]:
    """Questions about symbolic sizes that come up inside are answered for the sizes of tracing,
    and the graph gets no guard for the answer.

    For calls of ops that return new, contiguous tensors of any size: torch asks of every traced
    tensor whether a size is 1, as its stride would not count then, and the answer to that is the
    same. A graph for lengths above 16 would be the result where a tensor has ceil(T / 16) columns.
    """
    symbolic = [size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)]
    with symbolic[0].suppress_guards() if symbolic else nullcontext():
        yield
