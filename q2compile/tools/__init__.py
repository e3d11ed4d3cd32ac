# SPDX-License-Identifier: Apache-2.0
"""What is used from outside: `explain`, `quantize`, the commands, what reproducers call. May import
all; nobody imports it but the public face.
"""
