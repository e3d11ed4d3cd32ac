# SPDX-License-Identifier: Apache-2.0
"""The cost of a linear layer, by data sheet. May import recipes and runtime_kernels."""
