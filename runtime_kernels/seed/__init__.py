from q2compile.runtime_kernels.seed import op, reference

__all__ = ["op", "reference"]
