# SPDX-License-Identifier: Apache-2.0
"""Where the package stands on internals of torch, and what differs in them between its versions:
support for a new one starts here. ``patches`` is the table of what it replaces in torch. May import
errors.
"""
