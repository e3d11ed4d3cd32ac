"""The console script ``q2compile``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from q2compile.compat import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status: 0 done, 2 for input that can't be used."""
    parser = argparse.ArgumentParser(
        prog="q2compile", description="Tools beside the torch.compile backend 'quartet2'."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    report = commands.add_parser("report", help="a dump folder as one HTML page")
    report.add_argument("folder", metavar="DIR", help="the folder given as options={'dump': DIR}")
    report.add_argument("-o", "--output", help="the page to write; default DIR/report.html")
    arguments = parser.parse_args(argv)
    try:
        return _report(arguments.folder, arguments.output)
    except ConfigError as error:
        print(f"q2compile: {error}", file=sys.stderr)
        return 2


def _report(folder: str, output: str | None) -> int:
    from q2compile.html import dump_page

    page = dump_page(folder)
    path = Path(output) if output else Path(folder) / "report.html"
    path.write_text(page, encoding="utf-8")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
