from q2compile.runtime_kernels.split_scales import op, reference

__all__ = ["op", "reference"]
