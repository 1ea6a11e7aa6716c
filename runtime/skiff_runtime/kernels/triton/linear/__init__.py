"""Matrix-product kernels in the model's own type."""
