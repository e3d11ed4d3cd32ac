# SPDX-License-Identifier: Apache-2.0
"""The arguments of each command, parsed before the command is imported.

This module imports no torch, which takes seconds: --help and a typing error are answered at once.
Names that belong to tables of other modules are repeated here; a test compares them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

BENCH_GROUPS = (
    "rates",
    "checks",
    "codes",
    "quantizers",
    "products",
    "grouped",
    "linear",
    "block",
    "host",
    "losses",
)
BENCH_UNITS = (
    "us: median microseconds per call (min: the fastest; p90: 9 of 10 calls took at most this). "
    "copies: the time divided by that of copying the operand in bf16. predicted: from data sheets, "
    "then the prediction divided by the median: 0.50 means that the call took twice as long"
)
EXPORT_ACTIVATIONS = ("weight-only", "dynamic", "static")
EXPORT_FORMATS = ("compressed-tensors", "modelopt", "safetensors")
PREDICTED_DEVICES = ("b200", "rtx5090")
# The result of FILE.py:FUNCTION.
BUILT = "(model, batches) or (model, batches, loss)"


def report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Makes one HTML page of a run: its dump, its telemetry and the result of compare."
    )
    parser.add_argument(
        "folder",
        metavar="RUN",
        help="a folder given as options={'dump': RUN}, as telemetry's 'to' or as compare's --out, "
        "or one that holds these",
    )
    parser.add_argument("-o", "--output", help="the page to write; default RUN/report.html")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time each matmul that was taken, and BF16, on this machine",
    )


def compare(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Finds where a recipe's error comes from: runs a model in bf16 and in the recipe, ranks "
        "its modules, and writes the policy that puts the worst into fp8 or bf16."
    )
    parser.add_argument(
        "build",
        metavar="FILE.py:FUNCTION",
        help=f"or package.module:FUNCTION; called without arguments it returns {BUILT}: a model "
        "on its device, a few batches, and a function from the model's output to the loss",
    )
    parser.add_argument("--recipe", help="default: the recipe in Q2COMPILE_CONFIG, or quartet2")
    parser.add_argument(
        "--budget",
        type=float,
        default=0.1,
        help="largest share to put back into fp8 or bf16; default %(default)s",
    )
    parser.add_argument(
        "--of",
        choices=("flops", "time"),
        default="flops",
        help="what --budget is a share of; default %(default)s",
    )
    parser.add_argument(
        "--device",
        choices=PREDICTED_DEVICES,
        default=PREDICTED_DEVICES[0],
        help="the GPU of the predicted time, with --of time; default %(default)s",
    )
    parser.add_argument(
        "--autocast", choices=("bfloat16", "float16"), help="run under autocast to this dtype"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/compare"),
        help="the folder to write into; default %(default)s",
    )


def export(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes a checkpoint for inference. The layers that the policy quantizes are written as "
        "the codes of their forward, and all other tensors unchanged."
    )
    parser.epilog = (
        "The options of training decide which layers are quantized, and how: --options, "
        "Q2COMPILE_CONFIG, or those that FILE.py:FUNCTION compiles its model with."
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a folder that save_pretrained wrote; or FILE.py:FUNCTION, which returns (model, "
        "batches), the model with its trained weights and batches to call it with",
    )
    parser.add_argument("folder", type=Path, help="a new or empty folder to write")
    parser.add_argument(
        "--format",
        choices=EXPORT_FORMATS,
        default="compressed-tensors",
        help="default %(default)s",
    )
    parser.add_argument(
        "--activations",
        choices=EXPORT_ACTIVATIONS,
        default="weight-only",
        help="static takes --telemetry, or the batches of FILE.py:FUNCTION; default %(default)s",
    )
    parser.add_argument("--telemetry", type=Path, help="the telemetry folder of training")
    _options_of_training(parser)
    parser.add_argument(
        "--autocast",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="the dtype of training's forward; default %(default)s",
    )
    parser.add_argument(
        "--inexact",
        choices=("raise", "leave"),
        default="raise",
        help="what to do with layers whose codes the format can't hold exactly: raise an error, or "
        "leave them in high precision; default %(default)s",
    )


def _options_of_training(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--options",
        type=Path,
        metavar="FILE",
        help="the options of training: a TOML or JSON file of them, or the run.json of a dump",
    )
    parser.add_argument(
        "--recipe", help="the recipe of training, if it had no policy; replaces that of --options"
    )


def explain(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Compiles a model once, runs it forward, and lists what the backend does with each matmul."
    )
    parser.add_argument(
        "build",
        metavar="FILE.py:FUNCTION",
        help="or package.module:FUNCTION; called without arguments it returns (model, batches): a "
        "model, which may be on the device 'meta', and batches, the first of which is its input",
    )
    _options_of_training(parser)
    parser.add_argument(
        "--autocast", choices=("bfloat16", "float16"), help="run under autocast to this dtype"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write an HTML page")


def bench(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measures and checks this machine, and writes a report to be sent."
    parser.epilog = f"Units: {BENCH_UNITS}."
    parser.add_argument(
        "--only",
        metavar="GROUPS",
        default=",".join(BENCH_GROUPS),
        help="groups to run, separated by commas; default %(default)s",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        default=Path("q2compile-bench.jsonl"),
        help="the report to write; default %(default)s",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        default=300.0,
        help="stop a group after this time; default %(default).0f",
    )
    parser.add_argument(
        "--no-remember", action="store_true", help="ignored, so that old commands still run"
    )
    parser.add_argument("--read", type=Path, metavar="FILE", help="print a report and its faults")


def recipes(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists recipes with the operands of their GEMMs, schemes and transforms."
    parser.add_argument(
        "--global-scale",
        choices=("pow2", "exact"),
        default="pow2",
        help="the value of the option global_scale; default %(default)s",
    )


def doctor(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists and checks the kernels that this machine can run."
    parser.add_argument(
        "--no-check", action="store_true", help="list the kernels without checking them"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also list the kernels that passed"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--recheck", action="store_true", help="check only the kernels that are rejected so far"
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="check only the GEMMs of a GPU, with 1 to 4096 rows; takes a minute",
    )
    parser.add_argument(
        "--clear-cache",
        action="store_true",
        help="delete compiled kernels and results of checks, then exit",
    )
