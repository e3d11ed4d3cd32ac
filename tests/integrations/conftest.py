# SPDX-License-Identifier: Apache-2.0
"""torchvision beside a CPU build of torch, for timm and open_clip, which import it.

PyPI's torchvision for x86-64 is built for CUDA. Its C++ ops do not load beside a CPU build of
torch. Its import then fails where it describes two of them, and succeeds with their schemas
declared. Models of timm and open_clip use none of these ops.
"""

from __future__ import annotations

import importlib.util
import sys

import torch


def pytest_configure() -> None:
    """Before a library that imports torchvision where it finds it, as transformers does."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision
    except RuntimeError as error:
        assert "torchvision::nms does not exist" in str(error)
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for op in ("nms", "qnms"):
            torch.library.define(f"torchvision::{op}", schema)
        import torchvision
    assert torchvision.__version__
