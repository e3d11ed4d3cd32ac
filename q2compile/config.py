# SPDX-License-Identifier: Apache-2.0
"""The options of ``torch.compile(model, backend="quartet2", options={...})``, parsed strictly."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypedDict

from q2compile.errors import ConfigError, naming, one_of, shown
from q2compile.recipes.option_types import PolicyValue, RecipeChange, RecipeName
from q2compile.recipes.policy import Policy
from q2compile.runtime_kernels.kernel_states import (
    OPTION,
    VARIABLE,
    disable,
    named_in_environment,
)
from q2compile.telemetry.options import TelemetryMapping, TelemetryOptions
from q2compile.torch_internals.inductor import (
    JOINT_PASS_SLOT,
    PASS_SLOT,
    check_inductor_option,
    inductor_options_of_mode,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SEEDS = range(-(2**63), 2**64)  # what the option ``seed`` takes

CONFIG_FILE_VARIABLE = "Q2COMPILE_CONFIG"

Mode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "lite"]
"""Inductor's modes. An older torch may lack one: `Config` checks."""


class Options(TypedDict, total=False):
    """The keys of ``options`` of torch.compile, for type checkers: see `Config`."""

    recipe: RecipeName | RecipeChange
    policy: Mapping[str, PolicyValue]
    global_scale: Literal["pow2", "exact"]
    dump: str | os.PathLike[str] | None
    strict: bool
    mode: Mode | None
    inductor: Mapping[str, Any]
    inner: Literal["inductor", "eager"]
    disable_passes: Sequence[str]
    disable_kernels: Sequence[str]
    keep_packed: bool
    cache_weights: bool
    recompute_weights: bool | Literal["auto"]
    fuse_rotations: bool | Literal["auto"]
    on_error: Literal["raise", "bf16"]
    seed: int | None
    telemetry: TelemetryMapping | None


# How deep an option's mappings and lists may stand in one another; settings of Inductor have three.
_DEPTH = 20


class _Frozen(Mapping[str, Any]):
    """A mapping that can't be changed.

    Two are equal if they have the same items, of the same types, in the same order, at every depth:
    the last match of a policy wins, and Inductor runs some settings in the given order.
    """

    def __init__(self, items: Mapping[str, Any] | None = None, option: str = "options") -> None:
        self._items: dict[str, Any] = _copied(items or {}, option)
        self._meaning = _meaning(self._items)

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
        return self._meaning == (other if isinstance(other, _Frozen) else _Frozen(other))._meaning

    def __repr__(self) -> str:
        return repr(self._items)


def _copied(value: Any, option: str, depth: int = 0) -> Any:
    """``value`` with its mappings and lists copied, so that later changes of the user's have no
    effect. Their elements (a pass for Inductor, for example) stay the same objects."""
    if depth > _DEPTH:
        raise ConfigError(f"{option}: nested more than {_DEPTH} deep; no option has so many levels")
    if isinstance(value, Mapping):
        return {key: _copied(v, option, depth + 1) for key, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(v, option, depth + 1) for v in value)
    return value


def _meaning(value: Any) -> Any:
    """A key that distinguishes values that == does not: order of dicts, 1 and True."""
    if isinstance(value, dict):
        return (dict, *((_meaning(key), _meaning(v)) for key, v in value.items()))
    if type(value) in (list, tuple):
        return (type(value), *map(_meaning, value))
    return type(value), value


@dataclass(frozen=True)
class Config:
    """The backend's options. Construction checks every value and raises ValueError at once.

    recipe          a recipe's name, or a mapping that changes one (see `recipes.resolve`)
    policy          {pattern: recipe or mapping}; the last match wins (see `policy`)
    global_scale    "pow2": a power of two that is computed after the codes; "exact": computed from
                    the amax, as in the papers
    dump            a folder for every stage of every graph and the report; None writes nothing
    strict          raise if a pattern matches nothing, or if a matmul that the policy wants was not
                    taken or not seen; if no graph reaches the backend, only `expect` raises
    mode            a mode of Inductor: "default", "reduce-overhead", "max-autotune", ...
    inductor        settings of Inductor's config for only these graphs
    inner           "inductor", or "eager" to run the rewritten graphs without Inductor
    disable_passes  names of graph passes to leave out, to find which one is at fault
    disable_kernels  names of kernels that must not run, such as "cublaslt_fp4" or "quantize.cuda".
                    Others take their place in the whole process, from this graph on. Kernels that
                    Q2COMPILE_DISABLE_KERNELS names are disabled, too
    keep_packed     under activation checkpointing, save the quantized operands of a checkpointed
                    region instead of recomputing them (see `passes.joint.keep_packed`)
    cache_weights   quantize each weight once, and use the codes until the weight changes: in all
                    micro-batches of a step, and in inference (`weight_cache` says which changes
                    are noticed)
    recompute_weights  True: the backward recomputes the codes of weights from the parameters, which
                    saves 4.5 bits per parameter; False: codes are saved; "auto": codes are saved
                    if they do not raise the peak of a step (`passes.joint.saved_weights` has the
                    rule). If codes are not saved but follow from the block scales of a bf16
                    parameter, these are: half a bit per parameter (`passes.joint.save_weights`)
    fuse_rotations  True: quantizers that rotate compute their operand themselves, if it is one
                    expression and this is expected to be faster (`lowering.prologue`); False: they
                    read it from memory; "auto": True on GPUs of compute capability 9.x, where it
                    was measured (`examples/benchmarks/quantizers.py`), unless there is telemetry,
                    which has to read operands
    on_error        what happens if a stage of q2compile fails. "raise": a StageError names the
                    graph, the stage and a file that reproduces the error; "bf16": warn, and compile
                    that graph with plain Inductor
    seed            an int of 64 bits, signed or unsigned: random bits of the backward come from
                    q2compile's own counter on each device, with this key, so that dropout and noise
                    are the same as in a bf16 run (see `q2compile.get_rng_state`). None: they come
                    from torch's default generator
    telemetry       record the errors of each quantized operand once every so many steps: a mapping
                    with the keys every, modules, to, csv, tensorboard (see `telemetry.options`).
                    None records nothing
    """

    recipe: RecipeName | RecipeChange = "quartet2"
    policy: Mapping[str, PolicyValue] = _Frozen()
    global_scale: Literal["pow2", "exact"] = "pow2"
    dump: str | os.PathLike[str] | None = None
    strict: bool = False
    mode: Mode | None = None
    inductor: Mapping[str, Any] = _Frozen()
    inner: Literal["inductor", "eager"] = "inductor"
    disable_passes: Sequence[str] = ()
    disable_kernels: Sequence[str] = ()
    keep_packed: bool = False
    cache_weights: bool = False
    recompute_weights: bool | Literal["auto"] = "auto"
    fuse_rotations: bool | Literal["auto"] = "auto"
    on_error: Literal["raise", "bf16"] = "raise"
    seed: int | None = None
    telemetry: TelemetryMapping | None = None

    _has_read_file = False  # no option: the file of Q2COMPILE_CONFIG is part of this Config

    def __new__(cls, *_: Any, **options: Any) -> Config:
        cls._check_names(options)  # Python's own error for an unknown one names no right one
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("policy", "inductor"):
            if not isinstance(getattr(self, name), Mapping):
                raise ConfigError(f"{name}: got {shown(getattr(self, name))}; allowed: a mapping")
        for name in ("recipe", "policy", "inductor", "telemetry"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, _Frozen(value, name))
        if isinstance(self.dump, os.PathLike):
            object.__setattr__(self, "dump", os.fspath(self.dump))
        if not (self.dump is None or isinstance(self.dump, str) and self.dump):
            raise ConfigError(f"dump: got {shown(self.dump)}; allowed: a folder's path or None")
        with_auto = "recompute_weights", "fuse_rotations"
        for name in ("strict", "keep_packed", "cache_weights", *with_auto):
            value, other = getattr(self, name), ("auto",) if name in with_auto else ()
            if not (isinstance(value, bool) or isinstance(value, str) and value in other):
                allowed = ", ".join(map(repr, (*other, True, False)))
                raise ConfigError(f"{name}: got {shown(value)}; allowed: {allowed}")
        one_of("global_scale", self.global_scale, ("pow2", "exact"))
        one_of("inner", self.inner, ("inductor", "eager"))
        one_of("on_error", self.on_error, ("raise", "bf16"))
        is_number = isinstance(self.seed, int) and not isinstance(self.seed, bool)
        if self.seed is not None and not (is_number and SEEDS.start <= self.seed < SEEDS.stop):
            raise ConfigError(
                f"seed: got {shown(self.seed)}; allowed: an int of 64 bits, or None for torch's "
                "default generator"
            )
        if self.strict and self.on_error == "bf16":
            raise ConfigError(
                "strict=True raises for a matmul that is not taken, on_error='bf16' leaves a graph "
                "in bf16 when q2compile fails on it; choose one"
            )
        if self.cache_weights and self.recompute_weights is True:
            raise ConfigError(
                "cache_weights=True caches the codes of weights until they change, "
                "recompute_weights=True saves none and recomputes them; choose one"
            )
        self._check_inductor()
        self._check_disabled()
        _ = self._policy, self._telemetry

    def _check_inductor(self) -> None:
        inductor_options_of_mode(self.mode)
        for slot in (PASS_SLOT, JOINT_PASS_SLOT):
            if slot in self.inductor:
                raise ConfigError(
                    f"inductor: {slot} holds q2compile's passes; set yours in "
                    "torch._inductor.config, and it runs before them"
                )
        for key, value in self.inductor.items():
            check_inductor_option(key, value)
        if self.inner == "eager" and self.fuse_rotations is True:
            raise ConfigError(
                "fuse_rotations=True needs Inductor's lowerings, but inner='eager' runs without "
                "Inductor; choose one"
            )
        if self.inner == "eager" and (self.mode or self.inductor):
            raise ConfigError(
                "inner='eager' runs without Inductor, so 'mode' and 'inductor' can't apply; "
                "leave them out or use inner='inductor'"
            )

    def _check_disabled(self) -> None:
        from q2compile.passes import pass_names

        for option in ("disable_passes", OPTION):
            names = getattr(self, option)
            if not isinstance(names, list | tuple):
                raise ConfigError(f"{option}: got {shown(names)}; allowed: a list of names")
            object.__setattr__(self, option, tuple(names))
        for name in self.disable_passes:
            one_of("pass in disable_passes", name, pass_names())
        if self.disable_kernels:
            _check_kernel_names(f"kernel in {OPTION}", self.disable_kernels)

    @cached_property
    def _policy(self) -> Policy:
        return Policy.build(self.recipe, self.policy, self.global_scale)

    @cached_property
    def _telemetry(self) -> TelemetryOptions | None:
        return None if self.telemetry is None else TelemetryOptions.of(self.telemetry)

    @classmethod
    def from_options(
        cls, options: Mapping[str, Any] | Config | None = None, mode: str | None = None
    ) -> Config:
        """The Config of torch.compile's ``options`` and ``mode`` over the file that
        Q2COMPILE_CONFIG names. An option given here replaces the file's of the same name. An option
        of a Config that has its default counts as not given.

        Raises ValueError for an unknown key or value, saying what came, what is allowed, and the
        nearest right name.
        """
        if isinstance(options, Config):
            if options._has_read_file or not _read_config_file():
                return options
            options = changed_options(options)
        if not isinstance(options, Mapping | None):
            raise ConfigError(f"options: got {shown(options)}; allowed: a mapping or a Config")
        given = dict(options or {})
        if mode is not None:
            given["mode"] = mode
        of_file = {key: v for key, v in _read_config_file().items() if key not in given}
        try:
            config = cls._of({**of_file, **given})
            object.__setattr__(config, "_has_read_file", True)  # not read again over these options
            return config
        except ConfigError:
            with naming(f"{CONFIG_FILE_VARIABLE}={os.environ.get(CONFIG_FILE_VARIABLE)}"):
                cls._of(of_file)  # raises if the file alone is at fault
            raise

    @classmethod
    def _of(cls, options: Mapping[Any, Any]) -> Config:
        cls._check_names(options)  # Python takes no key that is not a text
        return cls(**options)

    @classmethod
    def _check_names(cls, options: Mapping[Any, Any]) -> None:
        for key in options:
            one_of("option", key, [f.name for f in fields(cls)])


# `help` shows the options, and not the arguments of __new__.
Config.__signature__ = signature(Config.__init__.__get__(object))  # type: ignore[attr-defined]


def resolved_policy(config: Config) -> Policy:
    """The recipe of each module, from the options ``recipe``, ``policy`` and ``global_scale``."""
    return config._policy


def telemetry_options(config: Config) -> TelemetryOptions | None:
    """The parsed option ``telemetry``; None if nothing is recorded."""
    return config._telemetry


def changed_options(config: Config) -> dict[str, Any]:
    """The options that differ from their defaults."""
    return {f.name: v for f in fields(config) if (v := getattr(config, f.name)) != f.default}


def disable_named_kernels(config: Config) -> None:
    """Disable the kernels that the option and the environment name, from now on."""
    disable(config.disable_kernels, f"option {OPTION}")
    if named := named_in_environment():
        _check_kernel_names(f"kernel in {VARIABLE}", named)
        disable(named, VARIABLE)


def saves_weights_by_peak(config: Config) -> bool:
    """Whether the memory of each graph decides which codes of weights are saved. It does not if
    another option, or a disabled pass, saves them all."""
    keeps_all = config.keep_packed or config.cache_weights
    left_out = "recompute_weights" in config.disable_passes
    return config.recompute_weights == "auto" and not keeps_all and not left_out


def uses_cuda_graphs(config: Config) -> bool:
    """Whether the options ask Inductor to launch kernels by CUDA graphs."""
    asked = {**inductor_options_of_mode(config.mode), **config.inductor}
    return bool(asked.get("triton.cudagraphs", False))


def raise_on_unsaved(config: Config) -> None:
    """Raise ConfigError for options that add something to the code that can't be saved."""
    unsaved = {
        "inner='eager'": config.inner == "eager",
        "cache_weights=True": config.cache_weights,
        "telemetry": config.telemetry is not None,
    }
    given = [name for name, is_given in unsaved.items() if is_given]
    if given:
        raise ConfigError(
            f"{', '.join(given)} can't be used with aot_compile, which saves only the code that "
            "Inductor generates: leave it out, or call the compiled function without aot_compile"
        )


class CallArguments(dict[str, Config]):
    """The arguments of one torch.compile call, as the backend read them: {"options": a Config}.

    Dynamo runs a graph again that an equal call compiled, and calls are equal if their arguments
    are. As torch keeps them these are the user's own dicts: equal in any order, changed when the
    user changes them, and silent about the file that Q2COMPILE_CONFIG names. These ones are equal
    to the arguments that mean the same now. Nothing of the user's is changed: torch's record of
    the call holds these in place of the user's dict, and the dict is only read.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(options=config)
        self._config = config
        self._equal: dict[Any, bool] = {}  # what other arguments say -> whether they mean the same

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        options, mode = other.get("options"), other.get("mode")
        if isinstance(options, Config):
            return options is self._config or options == self._config
        try:
            meaning = (_meaning(_copied(options, "options")), mode, _config_file_stamp())
            return self._equal[meaning]
        except KeyError:
            known = self._equal if len(self._equal) < _MOST_KNOWN else {}
            return known.setdefault(meaning, self._means(options, mode))
        except (ConfigError, TypeError):  # too deep, or with what can't be a key, such as a set
            return self._means(options, mode)

    def _means(self, options: Any, mode: Any) -> bool:
        try:
            return Config.from_options(options, mode) == self._config
        except ConfigError:
            return False  # Dynamo calls the backend then, and that raises it

    __hash__ = None


def _check_kernel_names(what: str, names: Sequence[str]) -> None:
    from q2compile.runtime_kernels.ops.table import kernel_names

    for name in names:
        one_of(what, name, kernel_names())


_MOST_KNOWN = 1000  # calls that Dynamo compares are as many as blocks that are compiled one by one


def _config_file_stamp() -> tuple[str, int, int] | None:
    """Identity of the policy file that the environment names, to see changes; None if it names
    none."""
    path = os.environ.get(CONFIG_FILE_VARIABLE)
    if not path:
        return None
    try:
        status = os.stat(path)
    except OSError:
        return path, -1, -1
    return path, status.st_mtime_ns, status.st_size


def is_config_file_named() -> bool:
    """True if the environment names a file of options."""
    return bool(os.environ.get(CONFIG_FILE_VARIABLE))


def _read_config_file() -> Mapping[str, Any]:
    """The mapping in the file that the environment names; {} when none is named."""
    path = os.environ.get(CONFIG_FILE_VARIABLE)
    return read_options_file(path, f"{CONFIG_FILE_VARIABLE}={path}") if path else {}


def read_options_file(path_text: str, where: str) -> Mapping[str, Any]:
    """Read the mapping in a TOML or JSON file. An error begins with ``where``."""
    path = Path(path_text)
    with naming(where):
        try:
            text = path.read_text(encoding="utf-8-sig")  # Windows may put a byte order mark first
            if path.suffix == ".toml":
                loaded = tomllib.loads(text)
            elif path.suffix == ".json":
                loaded = json.loads(text, object_pairs_hook=_without_duplicates)
            else:
                raise ConfigError("the name must end in .toml or .json")
        except ConfigError:
            raise
        except RecursionError:
            raise ConfigError("nested too deep") from None
        except OSError as error:
            raise ConfigError(str(error.strerror)) from None
        except ValueError as error:  # what json, tomllib and decoding raise
            raise ConfigError(str(error)) from None
        if not isinstance(loaded, Mapping):
            raise ConfigError(f"got a {type(loaded).__name__}; allowed: a table of options")
    return loaded


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object as a dict. Duplicate keys raise, as in TOML: a dict would have the first's
    place and the last's value, so that the last line of a policy would not win."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"the key {shown(twice)} occurs twice; keep one")
    return found
