# SPDX-License-Identifier: Apache-2.0
"""Pictures of report pages, their size, and how long they take to open. No test: a tool.

    python tests/support/report_pictures.py --llama 32 --out runs/pictures
    python tests/support/report_pictures.py --dump runs/demo/graphs/quartet2 --guides

Each page is opened five times in Chromium; times are from the start of the navigation until all
scripts have run (domComplete), and until something is on the screen. Then it is photographed at
1280 and 390 pixels, light and dark; --guides takes the two pictures of the guides instead.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.browser import Browser, missing  # noqa: E402

GUIDES = ROOT / "examples" / "guides" / "pictures"
COLORS = 200  # of a guide's picture, which is to be small


def dump_llama(folder: Path, layers: int) -> None:
    """Dump a forward and a backward of an unmodified Llama, compiled by Inductor."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    options = {"dump": str(folder), "policy": {"*lm_head*": "bf16"}}
    model = torch.compile(LlamaForCausalLM(config), backend="quartet2", options=options)
    tokens = torch.randint(1024, (2, 128))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()


def measure(browser: Browser, page: Path) -> None:
    """Print a page's size and opening times."""
    times = []
    for _ in range(5):
        browser.open(page)
        times.append(
            browser.js(
                "return [performance.getEntriesByType('navigation')[0].domComplete,"
                " performance.getEntriesByName('first-contentful-paint')[0]?.startTime || 0]"
            )
        )
    complete, painted = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{page}: {page.stat().st_size / 1e6:.2f} MB, scripts done after {complete:.0f} ms, "
        f"painted after {painted:.0f} ms (medians of {len(times)})"
    )


def photograph(browser: Browser, page: Path, out: Path) -> None:
    """All of the page, at both widths and in both themes."""
    for width in (1280, 390):
        for theme in ("light", "dark"):
            _open_with_graph(browser, page, width, theme)
            height = browser.js("return document.documentElement.scrollHeight")
            browser.size(width, min(height, 5000))
            browser.js("scrollTo(0, 0)")
            path = out / f"{page.parent.name}-{width}-{theme}.png"
            browser.driver.save_screenshot(str(path))
            print(path)


def photograph_for_guides(browser: Browser, page: Path) -> None:
    """The summary with the tree, light; a matmul and the graphs, dark."""
    GUIDES.mkdir(parents=True, exist_ok=True)
    _open_with_graph(browser, page, 1280, "light")
    browser.js("scrollTo(0, 0)")
    _save_small(browser, GUIDES / "report.png")
    _open_with_graph(browser, page, 1280, "dark")
    browser.click("#table .opener")
    browser.js("document.getElementById('shown').scrollIntoView()")
    _save_small(browser, GUIDES / "report-matmul-dark.png")


def _open_with_graph(browser: Browser, page: Path, width: int, theme: str) -> None:
    browser.open(page, width=width, theme=theme)
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
    parser.add_argument("--dump", type=Path, help="a dump folder")
    parser.add_argument(
        "--llama", type=int, metavar="LAYERS", help="dump a Llama of so many layers"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/pictures"))
    parser.add_argument(
        "--guides", action="store_true", help=f"write into {GUIDES.name}/ of guides"
    )
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    from q2compile.tools import cli

    arguments.out.mkdir(parents=True, exist_ok=True)
    folder = arguments.dump or arguments.out / "llama"
    if arguments.llama:
        dump_llama(folder, arguments.llama)
    if cli.main(["report", str(folder)]):
        return 2
    page = folder / "report.html"
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            measure(browser, page)
            if arguments.guides:
                photograph_for_guides(browser, page)
            else:
                photograph(browser, page, arguments.out)
        finally:
            browser.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
