from q2compile.runtime_kernels.rht_quantize_both import op, reference

__all__ = ["op", "reference"]
