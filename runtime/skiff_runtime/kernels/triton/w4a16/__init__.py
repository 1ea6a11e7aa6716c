"""W4A16 kernels: products of activations in 16 bits with int4 weights, and their dequantization."""
