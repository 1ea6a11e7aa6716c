"""All-reduce kernels over peer memory: one-shot and two-shot, and fused with the residual addition and RMSNorm."""
