# SPDX-License-Identifier: Apache-2.0
"""The console script ``q2compile``: each command is a module with ``run(arguments) -> status``."""

from __future__ import annotations

import argparse
import difflib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from q2compile import __version__
from q2compile.report.printable import SPELLED
from q2compile.tools import arguments

# For each command: its module in q2compile.tools, and its help. Its arguments are a function of its
# name in `arguments`.
COMMANDS = {
    "report": ("page.command", "make one HTML page of a run"),
    "explain": ("explain", "list what the backend does with each matmul of a model"),
    "compare": ("compare.measure", "find the modules that a recipe's error comes from"),
    "export": ("export.export", "write a checkpoint for inference from the codes of the forward"),
    "bench": ("bench.command", "measure and check this machine"),
    "recipes": ("recipes", "list recipes, schemes and transforms"),
    "doctor": ("doctor", "list and check the kernels of this machine"),
}
# Commands of earlier versions, and what replaces them.
MOVED = {
    "tables": "the papers' tables are measured by examples/paper_tables.py of the repository: "
    "python examples/paper_tables.py, with the same options",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status, 2 for what can't be used, read or written. Without
    a command the help is printed."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in MOVED:
        print(f"q2compile {words[0]}: {MOVED[words[0]]}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(
        prog="q2compile", description="Tools for the torch.compile backend 'quartet2'."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        getattr(arguments, name)(commands.add_parser(name, help=summary))
    if not words:
        parser.print_help()
        return 0
    if words[0] not in COMMANDS and not words[0].startswith("-"):
        near = difflib.get_close_matches(words[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        parser.error(f"unknown command {words[0]!r}{hint} Allowed: {', '.join(COMMANDS)}.")
    parsed = parser.parse_args(words)
    command = parsed.command
    from q2compile.errors import ConfigError, shown  # imports torch: all above does without

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=SPELLED)
    module, _ = COMMANDS[command]
    try:
        status: int = import_module(f"q2compile.tools.{module}").run(parsed)
        return status
    except BrokenPipeError:  # the reader of a pipe has left, and Python must not write there again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ConfigError, OSError) as error:
        stated: object = error
        if isinstance(error, OSError) and error.filename is not None:
            stated = f"{shown(str(error.filename))}: {error.strerror}"
        # compare's and export's messages begin with the command's name.
        text = str(stated).removeprefix(f"{command}: ")
        print(f"q2compile {command}: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
