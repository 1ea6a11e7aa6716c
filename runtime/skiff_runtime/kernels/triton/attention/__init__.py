"""Paged attention kernels: decode, prefill, and the fused QK-norm, RoPE and KV store."""
