# SPDX-License-Identifier: Apache-2.0
"""Passes over forward and backward graphs, and those twins of theirs that see both; see
`q2compile.passes`."""
