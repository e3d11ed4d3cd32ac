# SPDX-License-Identifier: Apache-2.0
"""When a stage raises: the error for the user, and a file that reproduces it. May import config,
graph and torch_internals."""
