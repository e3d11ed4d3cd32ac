from q2compile.runtime_kernels.quantize_masked import op, reference

__all__ = ["op", "reference"]
