"""Benchmarks of the engine and its parts, without HTTP."""
