# SPDX-License-Identifier: Apache-2.0
"""Takes the pictures of a report page for the guides. No test: a tool.

python -m tests.support.report_pictures runs/demo/graphs/quartet2
"""

from __future__ import annotations

import argparse
import tempfile
from io import BytesIO
from pathlib import Path

from q2compile.tools import cli
from tests.support.browser import Browser, missing

GUIDES = Path(__file__).resolve().parents[2] / "examples" / "guides" / "pictures"
COLORS = 200  # of a guide's picture, which is to be small


def photograph(browser: Browser, page: Path) -> None:
    """The summary with the tree, light; a matmul and the graphs, dark."""
    GUIDES.mkdir(parents=True, exist_ok=True)
    _open_with_graph(browser, page, "light")
    browser.js("scrollTo(0, 0)")
    _save_small(browser, GUIDES / "report.png")
    _open_with_graph(browser, page, "dark")
    browser.click("#table .opener")
    browser.js("document.getElementById('shown').scrollIntoView()")
    _save_small(browser, GUIDES / "report-matmul-dark.png")


def _open_with_graph(browser: Browser, page: Path, theme: str) -> None:
    browser.open(page, width=1280, theme=theme)
    browser.click(".tabs button")
    browser.until("return document.querySelector('.graph-body > *')")
    browser.js("document.activeElement.blur()")


def _save_small(browser: Browser, path: Path) -> None:
    from PIL import Image

    with Image.open(BytesIO(browser.driver.get_screenshot_as_png())) as picture:
        picture.convert("RGB").quantize(COLORS).save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dump", type=Path, help="a dump folder")
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    if cli.main(["report", str(arguments.dump)]):
        return 2
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            photograph(browser, arguments.dump / "report.html")
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
