# SPDX-License-Identifier: Apache-2.0
"""A run as one HTML page: its data, its opening sentences, and the files it is assembled from. May
import what report may."""
