# SPDX-License-Identifier: Apache-2.0
"""Prologue fusion: the CUDA kernel of a rotating quantizer computes its operand. May import what
lowering may.

expressions.py      from an expression of Inductor's to a prologue expression for our kernel
indices.py          the reads that it supports; shorter_steps.py shorter forms of its steps
fusion_rule.py      when fusing pays
fused_launches.py   what emits it
"""
