# SPDX-License-Identifier: Apache-2.0
"""`q2compile bench`: what this machine takes for quantizers, GEMMs, a linear, a Llama's block.

Imports what tools may. examples/benchmarks measure with `timing` and with `alive` (memory), too.
"""
