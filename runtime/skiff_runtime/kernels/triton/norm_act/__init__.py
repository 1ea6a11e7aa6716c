"""RMSNorm and gated activation kernels."""
