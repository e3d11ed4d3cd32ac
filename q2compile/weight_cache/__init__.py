# SPDX-License-Identifier: Apache-2.0
"""Codes of weights from outside of the graph: cached between calls under ``cache_weights``,
gathered by FSDP2 under `gather_codes`. May import capture, graph, linear, recipes, report.row
and torch_internals."""
