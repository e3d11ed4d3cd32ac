# SPDX-License-Identifier: Apache-2.0
"""The version alone: pyproject.toml reads it from here without importing the package."""

__version__ = "0.2.0"
