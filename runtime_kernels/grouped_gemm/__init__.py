from q2compile.runtime_kernels.grouped_gemm import op, reference

__all__ = ["op", "reference"]
