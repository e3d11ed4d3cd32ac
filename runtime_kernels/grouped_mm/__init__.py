from q2compile.runtime_kernels.grouped_mm import op, reference

__all__ = ["op", "reference"]
