from q2compile.runtime_kernels.rht_quantize import op, reference

__all__ = ["op", "reference"]
