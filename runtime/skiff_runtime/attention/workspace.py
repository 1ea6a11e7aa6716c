"""Size of the buffers that attention gathers K and V into; imports no torch."""

from typing import Final

GATHER_WORKSPACE_BYTES: Final = 64 << 20
"""Bytes of K and V that attention on a CPU gathers at a time, in float32; a single row may exceed it."""
