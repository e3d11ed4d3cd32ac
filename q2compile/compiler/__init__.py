# SPDX-License-Identifier: Apache-2.0
"""A rewritten graph through AOTAutograd, our passes and Inductor. May import graph, passes,
weight_cache, lowering and torch_internals; knows of reports only that somebody may watch.
"""
