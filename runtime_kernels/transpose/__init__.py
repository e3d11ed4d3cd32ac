from q2compile.runtime_kernels.transpose import op, reference

__all__ = ["op", "reference"]
