# SPDX-License-Identifier: Apache-2.0
"""When a stage raised: what the user is told, and a file that reproduces it. May import config and
torch_internals.
"""
