# SPDX-License-Identifier: Apache-2.0
"""The format of each GEMM, as data, and which module gets which. May import
runtime_kernels.numerics.

recipe.py      what a recipe is made of
published.py   every recipe, on one screen
resolve.py     an option's value -> a checked recipe
policy.py      module name -> recipe
option_types.py    types of the options, for type checkers
"""
