# SPDX-License-Identifier: Apache-2.0
"""`q2::linear` and its variants for experts: the three GEMMs of a recipe under autograd. May import
graph, recipes, runtime_kernels and torch_internals."""
