"""Runs planned steps on a device: model runner, input batch, sampler."""
