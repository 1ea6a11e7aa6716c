"""Ahead-of-time compilation of GPU kernels: the command skiff prebuild and its parts."""
