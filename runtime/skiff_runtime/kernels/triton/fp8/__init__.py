"""FP8 kernels: quantization, dequantization, GEMV and stream-K GEMM."""
