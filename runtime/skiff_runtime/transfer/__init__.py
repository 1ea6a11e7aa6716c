"""Parallel downloads of byte ranges, with resumption and checksums, for every source of models: hub, object store, registry.

It imports no torch: an init container runs it.
"""
