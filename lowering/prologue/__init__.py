# SPDX-License-Identifier: Apache-2.0
"""Prologue fusion: the CUDA kernel of a rotating quantizer computes its operand. May import what
lowering may.

expressions.py        a loop of Inductor's as an expression for our kernel
index_ways.py       how it reads; shorter_steps.py what is computed otherwise
fusion_rule.py      when it pays
fused_launches.py   the step of the lowering
fused_gate_up.py     of experts, whose operand is two side by side
concatenated.py     concatenations that a quantizer reads: one loop writes all parts
"""
