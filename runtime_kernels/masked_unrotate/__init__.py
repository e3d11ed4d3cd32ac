from q2compile.runtime_kernels.masked_unrotate import op, reference

__all__ = ["op", "reference"]
