# SPDX-License-Identifier: Apache-2.0
"""The options that a model was trained with, which decide how each weight is quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from q2compile.backend import quartet2
from q2compile.capture.module_names import expected_sites, loose_weights, plain_name
from q2compile.config import Config, is_config_file_named, resolved_policy
from q2compile.errors import ConfigError
from q2compile.recipes.policy import over_layers
from q2compile.report.compiled_options import options_of
from q2compile.torch_internals.dynamo import compile_arguments

_MOST = 12  # names in a message


def options_of_training(model: nn.Module, given: Mapping[str, Any] | Config | None) -> Config:
    """The options given; or those that the model, or its parts, were compiled with; or those of the
    file that the environment names. Raises ConfigError if there are none, or several."""
    if given is not None:
        return _of_weights(Config.from_options(given))
    known = options_of(model)
    found = _of_compiled_modules(model) or [config for config, *_ in known]
    found = list({resolved_policy(config): config for config in found}.values())
    if len(found) > 1:
        raise ConfigError(
            f"export: the model or its parts were compiled with {len(found)} different options; "
            "pass options= with one policy for the whole model"
        )
    if found:
        _check_names({place for _, place, _ in known}, found[0])
        return _of_weights(found[0])
    if is_config_file_named():
        return _of_weights(Config.from_options())
    raise options_not_known(model)


def compiled_parts(model: nn.Module) -> list[str]:
    """The names of the modules that were compiled, if it was not the whole model: the training ran
    what is in none of them as it is. [] for a whole model, or if nothing is known."""
    named = model.named_modules(remove_duplicate=False)
    parts = {plain_name(name) for name, m in named if compile_arguments(m, quartet2)}
    parts |= {"" if part is None else part for *_, part in options_of(model)}
    return [] if "" in parts else sorted(parts)


def _check_names(places: set[str], config: Config) -> None:
    """Raises ConfigError if the policy knows the model's layers by longer names than here."""
    if places and "" not in places and resolved_policy(config).rules:
        raise ConfigError(
            f"export: in the training the names of this model's layers began with {min(places)!r}, "
            "because a larger module or a function of several models ran it, and the policy uses "
            "those names. Export the larger module, or pass options= with the names of this model"
        )


def _of_weights(config: Config) -> Config:
    """The options without telemetry, whose patterns say nothing of a model's weights."""
    return replace(config, telemetry=None)


def _of_compiled_modules(model: nn.Module) -> list[Config]:
    arguments = [compile_arguments(module, quartet2) for module in model.modules()]
    return [Config.from_options(a.get("options"), a.get("mode")) for a in arguments if a]


def options_not_known(model: nn.Module) -> ConfigError:
    """The error for a model of which nothing says how it was trained: the recipe alone would also
    quantize layers that the policy of the training kept in BF16."""
    stacks = [name for name, shape in loose_weights(model).items() if len(shape) > 2]
    names = [plain_name(name) for name in (*expected_sites(model), *stacks)]
    folded = list(dict.fromkeys(over_layers(name) if "." in name else name for name in names))
    more = f" and {len(folded) - _MOST} more" if len(folded) > _MOST else ""
    return ConfigError(
        "export: the options of the training are not known: the model was not compiled by the "
        "backend quartet2 in this process. The recipe alone may quantize layers that the policy of "
        f"the training kept in BF16; this model has {', '.join(folded[:_MOST])}{more}. Pass the "
        "options of the training: options=, or --options with their file or with the run.json of "
        "a dump. If the training had no policy, pass its recipe: options={'recipe': 'quartet2'}, "
        "or --recipe quartet2"
    )
