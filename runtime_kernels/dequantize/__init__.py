from q2compile.runtime_kernels.dequantize import op, reference

__all__ = ["op", "reference"]
