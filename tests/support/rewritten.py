# SPDX-License-Identifier: Apache-2.0
"""The rewrite alone: the views, biases and graphs of a model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from q2compile.capture.inline_attention import inline_attention
from q2compile.capture.module_names import Names
from q2compile.config import Config
from q2compile.report.row import Row
from q2compile.rewrite.rewrite_graph import rewrite
from q2compile.torch_internals.dynamo import called_graphs

BF16 = ("bf16", "bf16", "bf16")


def rewritten(model: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Any, list[Row]]:
    """The output of the model with every matmul rewritten to q2::linear or its variants, and the
    report's rows.

    The rewritten graph then runs with the text bf16 for all GEMMs, so that only the rewrite is
    tested: the results must be the model's own.
    """
    rows: list[Row] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        inline_attention(gm)
        rows.extend(rewrite(gm, Config(**options), Names.of_graph(gm)))
        for module in called_graphs(gm):
            for node in module.graph.nodes:
                if str(node.target).startswith("q2."):
                    node.args = (*node.args[:-4], *BF16, node.args[-1])
            module.graph.lint()
            module.recompile()
        return gm

    torch._dynamo.reset()
    return torch.compile(model, backend=backend)(*inputs), rows
