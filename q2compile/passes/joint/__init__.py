# SPDX-License-Identifier: Apache-2.0
"""Passes over the joint graph that say what is kept for the backward; see `q2compile.passes`."""
