"""Benchmarks: load on a running server (online), the engine alone (offline), and the serving path alone (path)."""
