"""Sampling kernels: top-k and top-p thresholds, penalties, token bitmasks, the choice of tokens."""
