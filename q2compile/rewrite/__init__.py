# SPDX-License-Identifier: Apache-2.0
"""The policy's decision on each matmul, and the surgery on the graph. May import capture, graph,
linear, cost_model and report.row.
"""
