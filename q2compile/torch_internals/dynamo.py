# SPDX-License-Identifier: Apache-2.0
"""Dynamo: what its graphs carry, what it raises, and copies of its graphs."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg

from q2compile.torch_internals.fsdp import values_too
from q2compile.torch_internals.fsdp1 import is_flattened

# Whether a compiled graph gives the right gradient to an input that is an AsyncCollectiveTensor. It
# does in 2.11; from 2.12 to 2.15 backward fails in DTensor's redistribute.
ASYNC_INPUTS_KEEP_GRADIENTS = torch.__version__ < "2.12"


def control_flow() -> tuple[type[BaseException], ...]:
    """Exceptions that Dynamo raises through a backend, to retrace or to skip a frame."""
    from torch._dynamo import exc

    return (
        exc.RestartAnalysis,
        exc.SkipFrame,
        exc.Unsupported,
        *exc.exceptions_allowed_to_be_fallback,
    )


def compile_call(backend: Callable[..., Any]) -> Any:
    """Dynamo's record of the call torch.compile(backend=``backend``, ...) that it compiles for.
    None if something else calls the backend.

    Its attribute ``kwargs`` holds the mode and the options, and is what Dynamo compares to tell
    whether a graph was compiled by an equal call.
    """
    tracer = _tracer()
    call = None if tracer is None else _innermost_backend(tracer.output.compiler_fn)
    is_call = isinstance(call, torch._TorchCompileWrapper) and call.compiler_fn is backend
    return call if is_call else None


def is_compiled_by(package: str) -> bool:
    """Whether a backend from this package compiles the frame that Dynamo traces now."""
    tracer = _tracer()
    function = None if tracer is None else _innermost_backend(tracer.output.compiler_fn)
    function = getattr(function, "compiler_fn", function)
    function = getattr(function, "func", function)  # of a functools.partial
    return str(getattr(function, "__module__", "")).partition(".")[0] == package


def was_named(backend: str) -> bool:
    """Whether torch.compile was given this backend by its name: the registry then holds it."""
    from torch._dynamo.backends import registry

    return backend in registry._COMPILER_FNS


def compiled_frame() -> tuple[CodeType, Mapping[str, Any], Mapping[str, Any]] | None:
    """The code, the variables and the globals of the frame that Dynamo compiles now."""
    tracer = _tracer()
    frame = None if tracer is None else tracer.output.root_tx
    return None if frame is None else (frame.f_code, frame.f_locals, frame.f_globals)


def _tracer() -> Any:
    """Dynamo's tracer of this compilation; None if something else calls the backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        return InstructionTranslator.current_tx()
    except AttributeError:
        return None


def _innermost_backend(function: Any) -> Any:
    """The object given to torch.compile, without Dynamo's wrappers."""
    while hasattr(function, "_torchdynamo_orig_backend"):
        function = function._torchdynamo_orig_backend
    return function


def original_code(code: CodeType) -> CodeType:
    """A function's code as it was before Dynamo wrote it anew."""
    from torch._dynamo.utils import orig_code_map

    return code if (found := orig_code_map.get(code)) is None else found


def is_wrapper_of_callable(code: CodeType) -> bool:
    """Whether it is the function that torch.compile puts around what is not a function itself: a
    functools.partial, an object with ``__call__``. Its variable ``fn`` is that."""
    from torch._dynamo import external_utils

    return code.co_filename == external_utils.__file__ and "fn" in code.co_freevars


def original_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that torch.compile was called with, for the module that it returned; else None."""
    if not issubclass(type(module), torch._dynamo.OptimizedModule):
        return None
    return object.__getattribute__(module, "__dict__")["_modules"].get("_orig_mod")


@contextmanager
def not_compiled(model: Any) -> Iterator[None]:
    """``model`` as it was before ``model.compile(...)``: what that compiled, by its own backend and
    options, would run inside of any torch.compile."""
    compiled = getattr(model, "_compiled_call_impl", None)
    if compiled is None:
        yield
        return
    model._compiled_call_impl = None
    try:
        yield
    finally:
        model._compiled_call_impl = compiled


def is_region(code: CodeType) -> bool:
    """Whether it is the code of what torch.compile returns."""
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py")


def own_compile_call(module: torch.nn.Module) -> Any:
    """The record by which Dynamo decides whether a graph serves a module that torch.compile or
    Module.compile was called on: ``compile_call``'s, for most backends. None for other modules;
    `UNKNOWN` if torch does not show it."""
    attributes = object.__getattribute__(module, "__dict__")
    if issubclass(type(module), torch._dynamo.OptimizedModule):
        context = attributes.get("dynamo_ctx")
        return _innermost_backend(getattr(context, "callback", UNKNOWN))
    compiled = attributes.get("_compiled_call_impl")
    if compiled is None:
        return None
    code, cells = getattr(compiled, "__code__", None), getattr(compiled, "__closure__", None)
    if code is None or cells is None or "callback" not in code.co_freevars:
        return UNKNOWN
    return _innermost_backend(cells[code.co_freevars.index("callback")].cell_contents)


UNKNOWN = object()


def compile_arguments(
    module: torch.nn.Module, backend: Callable[..., Any]
) -> Mapping[str, Any] | None:
    """The mode and the options of the last ``torch.compile(module, backend=...)`` or
    ``module.compile(...)`` by ``backend``, given as a name. None if something else compiled the
    module, if nothing did, or if this torch keeps them elsewhere.
    """
    call = own_compile_call(module)
    is_call = isinstance(call, torch._TorchCompileWrapper) and call.compiler_fn is backend
    return call.kwargs if is_call else None


@contextmanager
def compiled_apart(
    model: torch.nn.Module, backend: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """``model`` compiled by ``backend`` without a trace in what else compiles it: where this torch
    can isolate them, its compiled versions don't count against the limit of those of training. An
    older torch gets a higher limit as long as this lasts. FSDP2 gathers values meanwhile.
    """
    isolates = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if isolates else {}
    raised = nullcontext() if isolates else torch._dynamo.config.patch(recompile_limit=1 << 16)
    with raised, values_too():
        yield torch.compile(model, backend=backend, **options)


@contextmanager
def compiling_apart(*examples: torch.Tensor) -> Iterator[list[Any]]:
    """A graph that is compiled inside has its own records in AOTAutograd, apart from the graph for
    which Dynamo called the backend. Yields ``examples`` as fake tensors of fixed sizes; torch's
    caches need a ShapeEnv in their mode."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    modes = [t.fake_mode for t in examples if isinstance(t, FakeTensor)]
    mode = modes[0] if modes else FakeTensorMode(shape_env=ShapeEnv())
    with torch._guards.tracing(torch._guards.TracingContext(mode)):
        yield [
            t if isinstance(t, FakeTensor) else mode.from_tensor(t, static_shapes=True)
            for t in examples
        ]


def skip_frames_of(function: Any) -> None:
    """A call of ``function`` from code that is not compiled runs as it is. Dynamo would compile it
    by itself, with torch.compiler.is_compiling() True. Inlined in another frame it is traced."""
    torch._dynamo.eval_frame.skip_code(function.__code__)


def skips_forward_of(module: torch.nn.Module) -> bool:
    """Whether Dynamo compiles the module's forward only inlined in others. It compiles that of a
    torch.nn class by itself if the module has hooks."""
    code = getattr(type(module).forward, "__code__", None)
    return code is None or bool(torch._dynamo.trace_rules.check(code))


def recompile_limit() -> int:
    """How many times Dynamo compiles one function; it runs further calls without compiling them."""
    limit: int = torch._dynamo.config.recompile_limit
    return limit


def is_at_recompile_limit(module: torch.nn.Module) -> bool:
    """Whether Dynamo has compiled the forward of the module's class that many times."""
    code = getattr(type(module).forward, "__code__", None)
    entries = torch._dynamo.eval_frame._debug_get_cache_entry_list
    return code is not None and len(entries(code)) >= recompile_limit()


def compile_id() -> str:
    """Dynamo's number of the graph that is compiled now, as in its logs: "0/0"."""
    return str(torch._guards.CompileContext.current_compile_id())


def parameter_of(node: fx.Node) -> torch.nn.Parameter | None:
    """The parameter behind a placeholder of a Dynamo graph, or behind a get_attr node, which
    parameters become under Inductor's freezing; None if it stands for something else. A tensor that
    torch.func.functional_call or FSDP1 puts in a parameter's place is one too.
    """
    if node.op == "get_attr":
        value: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        return value if isinstance(value, torch.nn.Parameter) else None
    arg = node.meta.get("grapharg")
    if arg is None:
        return None
    try:
        example = arg.example
    except AssertionError:  # the example was a temporary that is gone: no parameter
        return None
    stands_in = isinstance(example, torch.Tensor) and (
        "._parameters['" in source_text(arg) or is_flattened(example)
    )
    return example if isinstance(example, torch.nn.Parameter) or stands_in else None


@dataclass(frozen=True)
class _Argument:
    """Dynamo's GraphArg of a parameter."""

    parameter: weakref.ref[torch.nn.Parameter]
    source: Any

    @property
    def example(self) -> torch.nn.Parameter | None:
        return self.parameter()


def restore_arguments(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Note at the placeholders of a Dynamo graph which parameters they stand for, where Dynamo has
    erased it: it does before it calls a backend for ``torch.compile(...).aot_compile``.
    """
    tracing = torch._guards.TracingContext.try_get()
    if tracing is None:
        return
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=False):
        if "grapharg" in node.meta or not _is_own_parameter(value):
            continue
        source = getattr(tracing.tensor_to_context.get(value), "tensor_source", None)
        if source is not None:
            node.meta["grapharg"] = _Argument(weakref.ref(value), source)


def forget_arguments(*copies: fx.GraphModule, dynamo: fx.GraphModule | None = None) -> None:
    """Remove ``meta["grapharg"]`` from copied graphs after compilation: its weak references make
    torch.utils.swap_tensors fail. Dynamo removes it from its own graph, ``dynamo``, except what
    `restore_arguments` noted.
    """
    for outer in copies if dynamo is None else (*copies, dynamo):
        for gm in outer.modules():
            nodes = gm.graph.find_nodes(op="placeholder") if isinstance(gm, fx.GraphModule) else ()
            for node in nodes:
                if outer is not dynamo or isinstance(node.meta.get("grapharg"), _Argument):
                    node.meta.pop("grapharg", None)


def _is_own_parameter(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) and not isinstance(value, FakeTensor)


def mark_static(placeholders: Iterable[fx.Node]) -> None:
    """Mark inputs of a Dynamo graph whose addresses do not change from call to call: a CUDA graph
    reads them where they are, as it does parameters, and is recorded again if one changes."""
    for node in placeholders:
        node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}


def source_text(grapharg: Any) -> str:
    """Where Dynamo found an input: L['self']._modules['up']._parameters['weight']."""
    name: str = grapharg.source.name
    return name


# Attributes of a tensor that Dynamo writes as functions: .data, and the others from torch 2.15 on.
_ATTRIBUTES = {
    torch._C._autograd._get_data_attr: "data",  # type: ignore[attr-defined]
    torch.ops.aten.mT: "mT",
    torch.ops.aten.numpy_T: "T",
    torch.ops.aten.mH: "mH",
    torch.ops.aten.matrix_H: "H",
}


def dtensor_method(node: fx.Node) -> Literal["to_local", "redistribute"] | None:
    """Which of these methods of a DTensor ``node`` is: a call of it, or of a function of Dynamo's
    own that has the placements inside, as in torch 2.11."""
    name = getattr(node.target, "__name__", node.target)
    if name in ("to_local", "prim_to_local"):
        return "to_local"
    return "redistribute" if name in ("redistribute", "prim_redistribute") else None


def is_gather(node: fx.Node) -> bool:
    """Whether ``node`` is an all-gather along rows, as SimpleFSDP traces it, or waits for one."""
    name = str(node.target)
    ops = ("all_gather_into_tensor", "wait_tensor")
    return name.startswith("_c10d_functional") and name.split(".")[1] in ops


def attribute_read(node: fx.Node) -> str | None:
    """The attribute that a node of a Dynamo graph reads off its first argument, "mT" for x.mT; None
    if it does something else.
    """
    if node.op != "call_function":
        return None
    return str(node.args[1]) if node.target is getattr else _ATTRIBUTES.get(node.target)


def carry_sources(dynamo: fx.GraphModule, copy: fx.GraphModule) -> None:
    """Give a copy of Dynamo's graph what AOTAutograd reads off it and copying loses: where each
    input comes from, by which static inputs of CUDA graphs are known, too, and the name by which a
    precompiled backend is found. A graph that is not Dynamo's has none of them.
    """
    names = [graph.graph.find_nodes(op="placeholder") for graph in (dynamo, copy)]
    for original, node in zip(*names, strict=True):
        if hasattr(original, "_dynamo_source"):
            node._dynamo_source = original._dynamo_source
    for name in ("_param_name_to_source", "_source_to_user_stacks", "_backend_id"):
        if hasattr(dynamo, name):
            setattr(copy, name, getattr(dynamo, name))


def copied(gm: fx.GraphModule | None, graph: fx.Graph | None = None) -> fx.GraphModule:
    """``gm`` with new graphs, inside it (checkpoint bodies) too; tensors are shared.

    graph: a copy of its own graph that was made before, in place of one that is made now.
    """
    assert gm is not None
    new = fx.GraphModule(gm, graph or copy.deepcopy(gm.graph), type(gm).__name__)
    new.meta.update(gm.meta)
    carry_sources(gm, new)
    for name, inner in list(new.named_children()):
        if isinstance(inner, fx.GraphModule):
            setattr(new, name, copied(inner))
    return new


def noted(graph: fx.Graph) -> Callable[[], fx.Graph]:
    """A function that makes copies of ``graph`` as it is now. It notes what the nodes are, which
    takes a fraction of the time of a copy. Arguments of nodes are immutable."""
    rows = [
        (n, dict(n.meta), n.op, n.target, n.args, n.kwargs, n.name, n.type) for n in graph.nodes
    ]

    def made() -> fx.Graph:
        new, copies = fx.Graph(tracer_cls=graph._tracer_cls), dict[fx.Node, fx.Node]()
        for node, meta, op, target, *given, name, type_expr in rows:
            args, kwargs = map_arg(tuple(given), copies.__getitem__)
            copies[node] = new.create_node(op, target, args, kwargs, name, type_expr)
            copies[node].meta.update(meta)
        new._codegen = copy.deepcopy(graph._codegen)
        return new

    return made


def kept(gm: fx.GraphModule) -> Callable[[], fx.GraphModule]:
    """A function that makes copies of ``gm`` as it is now. Their code, which costs more than the
    graphs, is made then."""
    graph = noted(gm.graph)
    children = {n: kept(c) for n, c in gm.named_children() if isinstance(c, fx.GraphModule)}

    def made() -> fx.GraphModule:
        new = copied(gm, graph())
        for name, child in children.items():
            setattr(new, name, child())
        return new

    return made


def called_graphs(gm: fx.GraphModule) -> list[fx.GraphModule]:
    """The graphs that higher-order ops call inside of ``gm``, at any depth, each once, those that
    are called before those that call them, as Inductor walks them; ``gm`` itself comes last.
    """
    found: dict[fx.GraphModule, None] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        inner = inner_graph(gm, node)
        if inner is not None:
            found.update(dict.fromkeys(called_graphs(inner)))
    return [*found, gm]


def inner_graph(gm: fx.GraphModule, node: Any) -> fx.GraphModule | None:
    """The graph that a get_attr node of ``gm`` names for a higher-order op; None for any other."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value if isinstance(value, fx.GraphModule) else None
