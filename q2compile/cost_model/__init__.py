"""What a linear layer costs by data sheet. May import recipes and runtime_kernels."""
