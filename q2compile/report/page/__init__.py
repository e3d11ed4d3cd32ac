# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML page: the data in it, the sentences it opens with, and the files it is put
together from. May import what report may.
"""
