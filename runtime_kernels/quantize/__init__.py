from q2compile.runtime_kernels.quantize import op, reference

__all__ = ["op", "reference"]
