# SPDX-License-Identifier: Apache-2.0
"""What users are shown of a compilation: rows, tables, pages, dumps. The compiler tells it, and
never asks. May import capture, cost_model, linear, passes, recipes and lowering.
"""
