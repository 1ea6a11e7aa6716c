"""The tensor-parallel process group and its collectives."""
