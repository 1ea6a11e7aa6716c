"""One tensor-parallel rank: a scheduler and its engine in one process."""
