"""Triton kernels for GPUs. Imported where a tensor is on one, never on a machine without; each has its reference in
the module of the same name one level up, and gives the same numbers but for the order of sums."""
