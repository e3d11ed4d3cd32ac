# SPDX-License-Identifier: Apache-2.0
"""The global state of a process: attributes of torch's modules and classes, settings of Python's
runtime, and torch's global settings. Compared before and after a run.
"""

from __future__ import annotations

import builtins
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

State = dict[str, Any]  # qualified name -> the object itself, so that its id is not used again
MISSING = object()
# torch's record of compiled graphs: generated and loaded code, backends.
OF_GRAPHS = (
    "torch._inductor.runtime.compile_tasks.",
    "torch._dynamo.eval_frame:cached_backends[",
    "torch._inductor.codecache:",
    "torch._dynamo.mutation_guard:",
)
_NEW_LOGGER = (logging.NOTSET, False, True, [], [])


def state() -> State:
    """All of it. Values of the runtime are as `settings` has them."""
    return {**torch_attributes(), **settings()}


def torch_attributes() -> State:
    """``module:name`` and ``module:Class.name`` of everything under torch, and ``...[key]`` of what
    module-level dictionaries and those of classes hold, if it can be called."""
    found: State = {}
    for name, module in list(sys.modules.items()):
        if (name == "torch" or name.startswith("torch.")) and isinstance(module, ModuleType):
            found.update(_of_module(name, module))
    return found


def _of_module(name: str, module: ModuleType) -> Iterator[tuple[str, Any]]:
    for key, value in list(vars(module).items()):
        yield from _with_items(f"{name}:{key}", value)
        if isinstance(value, type) and value.__module__ == name:
            for attribute, inner in list(vars(value).items()):
                yield from _with_items(f"{name}:{key}.{attribute}", inner)


def _with_items(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield name, value
    if type(value) is dict or isinstance(value, Mapping) and "hooks" in name:
        for key, item in list(value.items()):
            if callable(item):
                yield f"{name}[{key!s}]", item


def settings() -> State:
    """Settings of Python and of torch, by name; each is compared with ==."""
    return {
        **_of_python(),
        **_of_logging(),
        **_of_torch(),
        **{f"config {name}": value for name, value in _configs()},
        **{f"environ {name}": value for name, value in os.environ.items()},
    }


def _of_python() -> State:
    hooks = ("excepthook", "displayhook", "unraisablehook", "breakpointhook", "__import__")
    return {
        **{f"sys.{name}": getattr(sys, name, None) for name in hooks},
        "sys.trace": sys.gettrace(),
        "sys.profile": sys.getprofile(),
        "sys.recursionlimit": sys.getrecursionlimit(),
        "sys.switchinterval": sys.getswitchinterval(),
        "sys.meta_path": list(sys.meta_path),
        "sys.path_hooks": list(sys.path_hooks),
        "sys.path": list(sys.path),
        "builtins": {k: v for k, v in vars(builtins).items() if k != "_"},
        "gc.enabled": gc.isenabled(),
        "gc.thresholds": gc.get_threshold(),
        "gc.callbacks": list(gc.callbacks),
        "gc.debug": gc.get_debug(),
        "gc.frozen": gc.get_freeze_count(),
        "signal": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "warnings.filters": list(warnings.filters),
        "warnings.showwarning": warnings.showwarning,
        "threading.excepthook": threading.excepthook,
        "random": random.getstate(),
        "cwd": os.getcwd(),
    }


def _of_logging() -> State:
    loggers: dict[str, Any] = {"root": logging.getLogger()}
    loggers |= logging.Logger.manager.loggerDict
    found: State = {"logging.disable": logging.Logger.manager.disable}
    for name, log in loggers.items():
        if isinstance(log, logging.Logger):
            rest = (log.disabled, log.propagate, list(log.handlers), list(log.filters))
            found[f"logger {name}"] = (log.level, *rest)
    return found


def _of_torch() -> State:
    hooks = [(module_hooks, name) for name in vars(module_hooks) if name.startswith("_global_")]
    hooks += [(optimizer_hooks, n) for n in vars(optimizer_hooks) if n.startswith("_global_")]
    read = (
        (torch, "get_default_dtype"),
        (torch, "get_default_device"),
        (torch, "are_deterministic_algorithms_enabled"),
        (torch, "is_deterministic_algorithms_warn_only_enabled"),
        (torch, "get_float32_matmul_precision"),
        (torch, "is_grad_enabled"),
        (torch, "is_inference_mode_enabled"),
        (torch, "is_autocast_enabled"),
        (torch, "is_autocast_cache_enabled"),
        (torch, "get_num_threads"),
        (torch, "is_anomaly_enabled"),
    )
    found: State = {f"torch.{name}": getattr(module, name)() for module, name in read}
    for module, name in hooks:
        value = getattr(module, name)
        found[f"{module.__name__}.{name}"] = dict(value) if isinstance(value, dict) else value
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is not None:
        found["inductor's choices handler"] = type(virtualized.V.choices)
    found["dispatch modes"] = list(_get_current_dispatch_mode_stack())
    found["torch function modes"] = torch._C._len_torch_function_stack()
    found["tracing context"] = torch._guards.TracingContext.try_get()
    found["saved tensor hooks"] = torch._C._autograd._saved_tensors_hooks_is_enabled()
    return found


def _configs() -> Iterator[tuple[str, Any]]:
    for name in ("torch._inductor.config", "torch._dynamo.config", "torch._functorch.config"):
        module: Any = sys.modules.get(name)
        if module is not None:
            for key, value in module.get_config_copy().items():
                yield f"{name}.{key}", value


def changes(before: State, after: State) -> dict[str, str]:
    """Names of what is another object now, has gone, or has come to a module or class that was
    there before. No changes are modules that were imported meanwhile with all that they hold, and
    data that torch keeps: of its attributes those count that can be called.
    """
    places = {name.split(":")[0] for name in before if ":" in name}
    found = {}
    for name in before.keys() | after.keys():
        old, new = before.get(name, MISSING), after.get(name, MISSING)
        if ":" in name:
            came = old is MISSING and (name.split(":")[0] not in places)
            data = not callable(old) and not callable(new)
            same = old is new or came or data or name.startswith(OF_GRAPHS)
        else:
            same = _equal(old, new) or old is MISSING and new == _NEW_LOGGER
        if not same:
            found[name] = "new" if old is MISSING else "gone" if new is MISSING else "changed"
    return found


def _equal(old: Any, new: Any) -> bool:
    if old is new:
        return True
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # of tensors, say
        return False
