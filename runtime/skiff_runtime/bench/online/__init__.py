"""Benchmarks of a running server: open-loop load, comparison of results, and CPU time per request and token."""
