# SPDX-License-Identifier: Apache-2.0
"""The cost of a linear layer, by data sheet. May import graph, recipes and runtime_kernels."""
