"""Kernels of mixture of experts: routing, sorting by expert, grouped products, and products of few tokens."""
