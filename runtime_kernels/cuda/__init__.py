"""CUDA kernels: sources without headers, NVRTC, a cubin cache, launches on torch's stream.

nvrtc.py        a .cu file and its defines -> a cubin
launch.py       a cubin on a device -> a launch
rotation.py     quantize, rht_quantize, rht_quantize_both, requantize
quest.py        quantize_masked, masked_unrotate
dequantize.py   dequantize
split_scales.py split_scales
gemm.py         gemm: fp4 through cuBLASLt, or bf16 through cuBLAS
selfcheck.py    a small tile through each kernel, against the reference
*.cu, *.cuh     the kernels; ptx.cuh holds all their inline PTX

Importing this registers the kernels; nothing of CUDA is loaded before the first call.
"""

from q2compile.runtime_kernels.cuda import dequantize, gemm, quest, rotation, split_scales

__all__ = ["dequantize", "gemm", "quest", "rotation", "split_scales"]
