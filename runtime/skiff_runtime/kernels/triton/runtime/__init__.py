"""Launching and compiling Triton kernels: cache keys, cached launches, programmatic dependent launch."""
