# SPDX-License-Identifier: Apache-2.0
"""Passes over the joint graph: they decide what is saved for the backward."""
