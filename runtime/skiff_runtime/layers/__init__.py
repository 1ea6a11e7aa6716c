"""Building blocks of decoder models, sharded over the tensor-parallel ranks."""
