"""The options of ``torch.compile(model, backend="quartet2", options={...})``, parsed strictly."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from q2compile import compat
from q2compile.errors import ConfigError
from q2compile.policy import Policy
from q2compile.suggest import one_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_FILE_VARIABLE = "Q2COMPILE_CONFIG"


class _Frozen(Mapping[str, Any]):
    """A mapping that can't be changed and whose order counts: the last match of a policy wins."""

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = copy.deepcopy(dict(items or {}))

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(tuple(self._items))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return list(self.items()) == list(other.items())

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Config:
    """The backend's options. Construction checks every value and raises ValueError at once.

    recipe          a recipe's name, or a mapping that changes one (see `recipes.resolve`)
    policy          {pattern: recipe or mapping}; the last match wins (see `policy`)
    global_scale    "pow2": a power of two found after the codes; "exact": the papers', from amax
    dump            a folder for every stage of every graph and the report; None writes nothing
    strict          raise when a pattern matches nothing, or a wanted matmul was not taken or seen;
                    when no graph at all reaches the backend only `explain` can tell
    mode            a mode of Inductor: "default", "reduce-overhead", "max-autotune", ...
    inductor        settings of Inductor's config for these graphs alone
    inner           "inductor", or "eager" to run the rewritten graphs without Inductor
    disable_passes  names of graph passes to leave out, to find which one is at fault
    keep_packed     under activation checkpointing, keep the quantised operands of a checkpointed
                    region instead of computing them again (see `passes.keep_packed`)
    cache_weights   quantise each weight once and use the codes until it changes: in all
                    micro-batches of a step, and in inference (see `weight_cache` for what is seen
                    as a change, and what is not)
    recompute_weights  backward quantises each weight again, from the parameter, instead of keeping
                    the codes: 4.5 bits a parameter less (see `passes.recompute_weights`)
    on_error        when a stage of q2compile raises: "raise" StageError, which names the graph, the
                    stage and a file that reproduces it; or "bf16": warn, and compile that graph
                    with Inductor alone
    """

    recipe: Any = "quartet2"
    policy: Mapping[str, Any] = _Frozen()
    global_scale: str = "pow2"
    dump: str | None = None
    strict: bool = False
    mode: str | None = None
    inductor: Mapping[str, Any] = _Frozen()
    inner: str = "inductor"
    disable_passes: tuple[str, ...] = ()
    keep_packed: bool = False
    cache_weights: bool = False
    recompute_weights: bool = False
    on_error: str = "raise"

    def __post_init__(self) -> None:
        for name in ("policy", "inductor"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name}: got {getattr(self, name)!r}; allowed: a mapping")
        for name in ("recipe", "policy", "inductor"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, _Frozen(value))
        if isinstance(self.dump, os.PathLike):
            object.__setattr__(self, "dump", os.fspath(self.dump))
        if not (self.dump is None or isinstance(self.dump, str) and self.dump):
            raise ConfigError(f"dump: got {self.dump!r}; allowed: a folder's path or None")
        for name in ("strict", "keep_packed", "cache_weights", "recompute_weights"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: got {getattr(self, name)!r}; allowed: True, False")
        one_of("global_scale", self.global_scale, ("pow2", "exact"))
        one_of("inner", self.inner, ("inductor", "eager"))
        one_of("on_error", self.on_error, ("raise", "bf16"))
        if self.strict and self.on_error == "bf16":
            raise ConfigError(
                "strict=True raises for a matmul that is not taken, on_error='bf16' leaves a graph "
                "in bf16 when q2compile fails on it; choose one"
            )
        if self.cache_weights and self.recompute_weights:
            raise ConfigError(
                "cache_weights=True keeps the codes of weights for as long as they are right, "
                "recompute_weights=True makes them again to keep none; choose one"
            )
        self._check_inductor()
        self._check_passes()
        _ = self.resolved_policy

    def _check_inductor(self) -> None:
        compat.inductor_options_of_mode(self.mode)
        for slot in (compat.PASS_SLOT, compat.JOINT_PASS_SLOT):
            if slot in self.inductor:
                raise ConfigError(
                    f"inductor: {slot} is q2compile's own place; set yours in "
                    "torch._inductor.config and it will run before q2compile's passes"
                )
        if self.inductor:
            known = compat.inductor_options()
            for key in self.inductor:
                one_of("setting of Inductor", key, known)
        if self.inner == "eager" and (self.mode or self.inductor):
            raise ConfigError(
                "inner='eager' runs without Inductor, so 'mode' and 'inductor' can't apply; "
                "leave them out or use inner='inductor'"
            )

    def _check_passes(self) -> None:
        from q2compile.passes import PASSES
        from q2compile.passes.joint import JOINT_PASSES

        if isinstance(self.disable_passes, str):
            raise ConfigError(
                f"disable_passes: got {self.disable_passes!r}; allowed: a list of names"
            )
        for name in self.disable_passes:
            one_of("pass", name, [*PASSES, *JOINT_PASSES])
        object.__setattr__(self, "disable_passes", tuple(self.disable_passes))

    @cached_property
    def resolved_policy(self) -> Policy:
        return Policy.build(self.recipe, self.policy, self.global_scale)

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any] | Config | None = None, mode: str | None = None
    ) -> Config:
        """The Config of torch.compile's ``options`` and ``mode`` over the file that
        Q2COMPILE_CONFIG names. An option given here replaces the file's of the same name.

        Raises ValueError for an unknown key or value, saying what came, what is allowed, and the
        nearest right name.
        """
        if isinstance(options, Config):
            return options
        given = {**_read_config_file(), **(options or {})}
        for key in given:
            one_of("option", key, [f.name for f in fields(cls)])
        if mode is not None:
            given["mode"] = mode
        return cls(**given)


def _read_config_file() -> Mapping[str, Any]:
    """The mapping in the TOML or JSON file that the environment names; {} when none is named."""
    path_text = os.environ.get(CONFIG_FILE_VARIABLE)
    if not path_text:
        return {}
    path = Path(path_text)
    where = f"{CONFIG_FILE_VARIABLE}={path_text}"
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            loaded = tomllib.loads(text)
        elif path.suffix == ".json":
            loaded = json.loads(text)
        else:
            raise ConfigError(f"{where}: the name must end in .toml or .json")
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    except ValueError as error:  # tomllib.TOMLDecodeError is a ValueError
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(loaded, Mapping):
        raise ConfigError(f"{where}: got a {type(loaded).__name__}; allowed: a table of options")
    return loaded
