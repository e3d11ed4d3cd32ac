"""`q2compile bench`: what this machine takes for quantisers, GEMMs, a linear, a Llama's block.

Imports what tools may. `timing` is what examples/benchmarks time with, too.
"""
