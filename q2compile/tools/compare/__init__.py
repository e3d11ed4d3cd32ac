# SPDX-License-Identifier: Apache-2.0
"""`compare`: where a recipe's error comes from, module by module, on the user's own model and data.

probe        every matmul of a compiled graph becomes one whose recipe is chosen run by run
measure      the runs: bf16, the recipe, each of its GEMMs alone, each module alone; the command
measurements what came out: a table, a picture, a policy within a budget
"""
