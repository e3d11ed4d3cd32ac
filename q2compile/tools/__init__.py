# SPDX-License-Identifier: Apache-2.0
"""Entry points: `explain`, `quantize`, the commands, functions that reproducers call. May import
all; only the public names import it."""
