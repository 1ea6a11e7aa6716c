"""Runs planned steps on a device: model runner, input batch, CUDA graphs, sampling pipeline."""
