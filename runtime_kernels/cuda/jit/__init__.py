# SPDX-License-Identifier: Apache-2.0
"""A .cu file becomes a launch: NVRTC, a cubin cache, the driver. Imports nothing else of the
project.
"""
