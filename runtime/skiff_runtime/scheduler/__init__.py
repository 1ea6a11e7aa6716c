"""Which tokens to compute next: queue, admission, batching, results. Pure host code, no torch."""
