from q2compile.runtime_kernels.pad_groups import op, reference

__all__ = ["op", "reference"]
