# SPDX-License-Identifier: Apache-2.0
"""All uses of torch's internals, and what differs in them between its versions: support for a new
one starts here. ``patches`` is the table of what is replaced in torch. May import errors.
"""
