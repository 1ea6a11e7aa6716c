"""Building blocks of decoder models, cut over tensor-parallel ranks."""
