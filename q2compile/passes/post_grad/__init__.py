# SPDX-License-Identifier: Apache-2.0
"""Passes over forward and backward graphs, and their variants over joint graphs; see
`q2compile.passes`."""
