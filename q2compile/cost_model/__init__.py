# SPDX-License-Identifier: Apache-2.0
"""The cost of a linear layer, by data sheet. May import graph, linear, lowering, passes, recipes,
runtime_kernels and torch_internals."""
