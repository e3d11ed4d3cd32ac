"""The console script ``q2compile``: a command is a module with a ``main(argv) -> exit status``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from q2compile.errors import ConfigError

COMMANDS = {
    "report": ("q2compile.html", "a dump folder as one HTML page"),
    "tables": ("q2compile.tables.command", "the papers' numeric tables, measured here"),
    "doctor": ("q2compile.runtime_kernels.doctor", "what this machine can run, with a self-check"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status, 2 for input that can't be used."""
    parser = argparse.ArgumentParser(
        prog="q2compile", description="Tools beside the torch.compile backend 'quartet2'."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, summary) in COMMANDS.items():
        # Each command parses its own arguments, --help among them.
        commands.add_parser(name, help=summary, add_help=False)
    arguments, rest = parser.parse_known_args(argv)
    module, _ = COMMANDS[arguments.command]
    try:
        return import_module(module).main(rest)
    except ConfigError as error:
        print(f"q2compile {arguments.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
