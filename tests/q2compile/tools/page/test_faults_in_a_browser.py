# SPDX-License-Identifier: Apache-2.0
"""Faults of the report's page that first-time readers found, at desktop and phone width."""

import pytest
import torch
from torch import nn

import q2compile
from q2compile.tools import cli
from tests.support.page_dumps import with_more_layers


@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_click_on_memory_arrives(browser, dumped, tmp_path, width):
    """Although the graph above it is rendered after the page opens."""
    folder = with_more_layers(dumped, tmp_path / "wide", 8)
    assert cli.main(["report", str(folder)]) == 0
    browser.open(folder / "report.html", width=width)
    browser.click('.bar nav a[href="#memory"]')
    near = (
        "const top = document.getElementById('memory').getBoundingClientRect().top;"
        "const end = scrollY + innerHeight >= document.documentElement.scrollHeight - 1;"
        "return document.querySelector('.graph-body > *') && (end ? top > 0 : top < 110)"
    )
    browser.until(near)
    top = "return document.getElementById('memory').getBoundingClientRect().top"
    assert 0 <= browser.js(top) < 900 and browser.js("return location.hash") == "#memory"
    assert browser.errors() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_no_drawing_is_cut(browser, dumped, width):
    browser.open(dumped / "report.html", width=width)
    browser.click("#table .opener", "layers.0–3.up")
    beyond = (
        "return [...document.querySelectorAll('.gemm')].map((e) => "
        "e.getBoundingClientRect().right - e.closest('.panel').getBoundingClientRect().right)"
    )
    found = browser.js(beyond)
    assert len(found) == 9 and max(found) <= 0
    assert browser.errors() == []


class Wrapped(nn.Module):
    """Dynamo reads the modules of one that has a __getattr__ from its __dict__."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def __getattr__(self, name):
        return super().__getattr__(name)

    def forward(self, x):
        return self.up(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Wrapped()
        self.scales = nn.ParameterList([torch.ones(32)])

    def forward(self, x):
        return self.mlp(x) * self.scales[0]


@pytest.mark.parametrize("of_function", [False, True])
def test_explain_calls_inputs_and_modules_as_the_model_does(browser, tmp_path, of_function):
    """In the two texts side by side."""
    torch._dynamo.reset()
    model = Outer()
    called = (lambda x: model(x)) if of_function else model
    report = q2compile.explain(called, torch.randn(4, 32), options={"inner": "eager"})
    page = tmp_path / "page.html"
    report.to_html(page)
    browser.open(page)
    browser.click(".tabs button", "Rewrite")
    browser.until("return document.querySelector('.graph-body > *')")
    text = browser.js("return document.querySelector('.graph-body').textContent")
    assert "scales.0" in text and "mlp.up.weight" in text
    assert "mlp.up" in browser.texts(".in-module button")
    for mangled in ("_modules", "_parameters_", "__dict__", "['"):
        assert mangled not in text
    assert browser.errors() == []
