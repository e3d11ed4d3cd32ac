# SPDX-License-Identifier: Apache-2.0
"""The vocabulary for FX graphs, which capture, passes, lowerings, telemetry and reports share. May
import runtime_kernels and torch_internals."""
