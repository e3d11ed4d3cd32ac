from q2compile.runtime_kernels.gemm import op, reference

__all__ = ["op", "reference"]
