"""LoRA kernels: the grouping of tokens by adapter, and both low-rank products in one launch."""
