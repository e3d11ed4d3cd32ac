# SPDX-License-Identifier: Apache-2.0
"""The runs of `compare`: bf16, the recipe, each of its GEMMs alone, each module alone, each kind of
layer alone in FP8; and the command."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from q2compile.capture.module_tree import named_parameters
from q2compile.config import Config, resolved_policy
from q2compile.errors import ConfigError, shown
from q2compile.recipes.option_types import RecipeChange, RecipeName
from q2compile.recipes.published import RECIPES
from q2compile.recipes.recipe import GEMMS
from q2compile.tools.as_it_was import as_it_was, same_random_numbers
from q2compile.tools.compare.measurements import Comparison, ModuleError, check_budget
from q2compile.tools.compare.probe import Probes, Run
from q2compile.tools.given import all_batches, arguments_of, built
from q2compile.tools.worst_layers import kinds_of
from q2compile.torch_internals.dynamo import not_compiled, original_module
from q2compile.torch_internals.fsdp import values_too

_BF16 = Run(gemms=())


def compare(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: RecipeName | RecipeChange = "quartet2",
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
    options: Mapping[str, Any] | None = None,
    alone: bool = True,
) -> Comparison:
    """Measure where a recipe's error comes from, on this model and these batches.

    model      the model in the mode, on the device and in the dtypes of its training. Call
               `compare` under the autocast of the training. The model's weights, gradients and
               buffers, and torch's random state, are restored afterwards
    batches    a few inputs of the model: each is a mapping of keyword arguments, a tuple of
               positional arguments, or a tensor
    recipe     the option of torch.compile; ``options`` has other ones ("policy", "global_scale")
    loss       a function from the model's output to a tensor of one element. The default is the
               output's ``loss``, or the output itself
    optimizer  a function from parameters to an optimizer. With it, the losses in bf16 and with the
               recipe are those of training over the batches, from the same weights. Without it, the
               weights stay as they are
    alone      whether to also run each module as the only quantized one, and each kind of layer as
               the only one in FP8, which takes one more step each, on the first batch.
               `Comparison.policy` needs these runs

    Errors are computed in fp32 or wider, with the same weights and random numbers in both runs. The
    baseline has the precision of the tensors, usually bf16. Measured are

    - for each module and GEMM the relative error √(Σ|q - g|² / Σ|g|²) of the result, with the
      operands of the baseline, so that errors of other modules do not count;
    - for the gradient of all parameters the relative error with the whole recipe, with each of its
      GEMMs alone, and with each module alone.

    Raises a ValueError if the model is not an nn.Module, if options can't be used, if there are no
    batches, if the output has no loss, or if no matmul of the model is taken.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"compare: got {shown(model)} for a model; allowed: an nn.Module, whose parameters' "
            "gradients are compared. Wrap a function in an nn.Module whose forward calls it"
        )
    original = original_module(model)
    model = model if original is None else original
    batches = list(all_batches(batches, "compare: batches"))
    config = Config.from_options({**(options or {}), "recipe": recipe, "inner": "eager"})
    probes = Probes(config)
    # Sizes are numbers, so that costs are: a second shape is compiled anew.
    compiled = torch.compile(model, backend=probes.backend, dynamic=False)
    runs = _Runs(model, compiled, probes, loss or _loss_of)
    with not_compiled(model), values_too():  # not the codes that `gather_codes` gathers
        with as_it_was(model):
            comparison = runs.compare(batches, config, alone)
        if optimizer is not None:
            comparison.losses = {
                name: runs.train(batches, run, optimizer)
                for name, run in (("bf16", _BF16), (resolved_policy(config).default.name, Run()))
            }
    return comparison


class _Runs:
    def __init__(
        self,
        model: nn.Module,
        compiled: Any,
        probes: Probes,
        loss: Callable[[Any], Tensor],
    ) -> None:
        self._model, self._compiled, self._probes, self._loss = model, compiled, probes, loss
        seen: dict[int, str] = {}  # of a shared parameter the first name
        named = list(named_parameters(model))
        self._parameters = {n: p for n, p in named if seen.setdefault(id(p), n) == n}

    def _forget_gradients(self) -> None:
        for p in self._parameters.values():
            p.grad = None

    def compare(self, batches: list[Any], config: Config, alone: bool) -> Comparison:
        name = resolved_policy(config).default.name
        comparison = Comparison(name, config.recipe, config.policy, losses={"bf16": [], name: []})
        own: dict[str, list[float]] = {}  # parameter -> relative errors under the whole recipe
        for i, batch in enumerate(batches):
            exact_loss, exact = self._gradients(batch, _BF16)
            comparison.losses["bf16"].append(exact_loss)
            self._gradients(batch, Run(measure=True))
            if i == 0:
                self._raise_on_nothing_taken()
            loss, gradients = self._gradients(batch, Run())
            comparison.losses[name].append(loss)
            for parameter, gradient in gradients.items():
                error = _relative({parameter: gradient}, {parameter: exact[parameter]})
                own.setdefault(parameter, []).append(error)
            comparison.note("all", _relative(gradients, exact))
            for gemm in GEMMS:
                _, gradients = self._gradients(batch, Run(gemms=(gemm,)))
                comparison.note(gemm, _relative(gradients, exact))
            if i == 0:
                modules = dict.fromkeys(row.module for row in self._probes.rows if row.taken)
                effects, in_fp8 = self._effects(batch, exact, list(modules) if alone else [])
        comparison.modules = self._modules(own, effects, in_fp8)
        comparison.left = {r.module: r.why for r in self._probes.rows if not r.taken}
        return comparison

    def _effects(
        self, batch: Any, exact: Mapping[str, Tensor], modules: Sequence[str]
    ) -> tuple[dict[str, float], dict[str, float]]:
        """The gradient's relative error with each module alone quantized; and each module's part of
        it with its kind of layer alone in FP8, where squares add up."""

        def effect(run: Run) -> float:
            return _relative(self._gradients(batch, run)[1], exact)

        is_fp8 = resolved_policy(self._probes.config).default.texts() == RECIPES["fp8"].texts()
        kinds = [] if is_fp8 else kinds_of(modules)
        effects = [(kind, effect(Run(modules=kind, in_fp8=True))) for kind in kinds]
        in_fp8 = {name: of / len(kind) ** 0.5 for kind, of in effects for name in kind}
        return {module: effect(Run(modules=(module,))) for module in modules}, in_fp8

    def train(
        self,
        batches: list[Any],
        run: Run,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    ) -> list[float]:
        """The losses of training over the batches, each before its step."""
        losses = []
        self._probes.run = run
        with as_it_was(self._model, weights=True):
            steps = optimizer(self._parameters.values())
            for batch in batches:
                loss = self._loss_on(batch)
                loss.backward()
                steps.step()
                steps.zero_grad()
                losses.append(float(loss.detach()))
        return losses

    def _gradients(self, batch: Any, run: Run) -> tuple[float, dict[str, Tensor]]:
        """The loss on a batch and the gradient of every parameter that has one."""
        self._probes.run = run
        self._forget_gradients()
        with same_random_numbers():
            loss = self._loss_on(batch)
            loss.backward()
        gradients = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        self._forget_gradients()
        return float(loss.detach()), gradients

    def _loss_on(self, batch: Any) -> Tensor:
        args, kwargs = arguments_of(batch)
        value = self._loss(self._compiled(*args, **kwargs))
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
            raise ConfigError(
                f"compare: got {shown(type(value).__name__)} for a loss; allowed: a tensor of one "
                "element with a gradient; give loss=, a function of the model's output"
            )
        return value

    def _raise_on_nothing_taken(self) -> None:
        if not any(row.taken for row in self._probes.rows):
            left = dict.fromkeys(f"{row.module}: {row.why}" for row in self._probes.rows)
            raise ConfigError(
                "compare: no matmul of this model is quantized. "
                + ("; ".join(list(left)[:5]) or "No graph with a matmul was compiled.")
            )

    def _modules(
        self, own: dict[str, list[float]], effects: dict[str, float], in_fp8: dict[str, float]
    ) -> list[ModuleError]:
        modules = []
        for module in dict.fromkeys(row.module for row in self._probes.rows if row.taken):
            rows = [r for r in self._probes.rows if r.taken and r.module == module]
            gradient = own.get(f"{module}.weight", own.get(module))
            modules.append(
                ModuleError.of(
                    rows,
                    [r for r in self._probes.rows_in_fp8 if r.module == module],
                    **{gemm: self._probes.noted(module, gemm).relative for gemm in GEMMS},
                    gradient=None if gradient is None else sum(gradient) / len(gradient),
                    effect=effects.get(module),
                    fp8_effect=in_fp8.get(module),
                )
            )
        return modules


def _loss_of(output: Any) -> Any:
    """The loss in a model's output: its attribute or key ``loss``, or the output itself."""
    if isinstance(output, Mapping) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def _relative(gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """√(Σ|q - g|² / Σ|g|²) over all of ``exact``; 0 if that is zero."""
    difference = norm = 0.0
    for name, g in exact.items():
        g = g.double()
        difference += float((gradients[name].double() - g).square().sum())
        norm += float(g.square().sum())
    return (difference / norm) ** 0.5 if norm else 0.0


def run(arguments: Namespace) -> int:
    """Measures, prints the table, writes it, the picture and the options. Returns the status."""
    # Mistakes are reported before the minutes that measuring takes.
    check_budget(arguments.budget)
    config = Config.from_options({} if arguments.recipe is None else {"recipe": arguments.recipe})
    model, batches, loss = built(arguments.build)
    arguments.out.mkdir(parents=True, exist_ok=True)
    device = next(model.parameters()).device.type
    autocast = (
        torch.autocast(device, getattr(torch, arguments.autocast))
        if arguments.autocast
        else nullcontext()
    )
    with autocast:
        comparison = compare(
            model,
            batches,
            config.recipe,
            loss=loss,
            options={"policy": config.policy, "global_scale": config.global_scale},
        )
    print(comparison, end="\n\n")
    limits = (arguments.budget, arguments.of, arguments.device)
    chosen = comparison.chosen(*limits)
    options = json.dumps(comparison.options(*limits), indent=2)
    if chosen:
        print(
            f"{len(chosen)} of {len(comparison.modules)} modules leave {comparison.recipe}, for "
            f"{arguments.budget:.0%} of the {arguments.of}; they account for "
            f"{_share(comparison, chosen):.0%} of the gradient's squared error:"
        )
    else:
        print(f"no module fits into {arguments.budget:.0%} of the {arguments.of}:")
    print(options)
    missed = comparison.too_large(*limits)
    if missed is not None:
        worst, needed = missed
        others = f" and {len(worst) - 1} like it" if len(worst) > 1 else ""
        print(
            f"{worst[0].module}{others}: {_share(comparison, worst):.0%} of the gradient's squared "
            f"error; --budget {needed:g} is enough for bf16"
        )
    data = {
        **comparison.to_json(),
        "limits": dict(zip(("budget", "of", "device"), limits, strict=True)),
    }
    print("wrote " + ", ".join(map(str, _written(arguments.out, comparison, data, options))))
    return 0


def _share(comparison: Comparison, modules: Sequence[ModuleError]) -> float:
    return sum(comparison.share(module) or 0.0 for module in modules)


def _written(
    folder: Path, comparison: Comparison, data: Mapping[str, Any], options: str
) -> list[Path]:
    """The files of a comparison; without the picture where matplotlib is not installed."""
    written = [folder / name for name in ("compare.json", "options.json", "compare.png")]
    written[0].write_text(json.dumps(data, indent=1), encoding="utf-8")
    written[1].write_text(options, encoding="utf-8")
    try:
        comparison.draw(written[2])
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return written[:2]
    return written
