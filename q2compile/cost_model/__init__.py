# SPDX-License-Identifier: Apache-2.0
"""What a linear layer costs by data sheet. May import recipes and runtime_kernels."""
