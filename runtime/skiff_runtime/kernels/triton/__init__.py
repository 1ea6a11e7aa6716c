"""Triton kernels for GPUs, each with the function that launches it.

Imported where a tensor is on a GPU, never on a machine without Triton. The functions have their references in the
modules above, and return the same numbers but for the order of sums.
"""
