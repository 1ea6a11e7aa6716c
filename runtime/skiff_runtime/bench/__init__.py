"""Load generator for a running server, and the offline throughput benchmark."""
