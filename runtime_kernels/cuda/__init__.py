"""CUDA kernels: sources without headers, NVRTC, a cubin cache, launches on torch's stream.

nvrtc.py      a .cu file and its defines -> a cubin
launch.py     a cubin on a device -> a launch
rotation.py   rht_quantize, rht_quantize_both, requantize
*.cu, *.cuh   the kernels; ptx.cuh holds all the inline PTX
"""
