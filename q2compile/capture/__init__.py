# SPDX-License-Identifier: Apache-2.0
"""A Dynamo graph's matmuls, and the names of their modules. May import graph,
linear.tensor_parallel and torch_internals.
"""
