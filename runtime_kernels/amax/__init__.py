from q2compile.runtime_kernels.amax import op

__all__ = ["op"]
