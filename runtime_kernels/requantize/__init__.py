from q2compile.runtime_kernels.requantize import op, reference

__all__ = ["op", "reference"]
