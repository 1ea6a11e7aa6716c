"""Prometheus metrics of the runtime: definitions, labels, families and exposition."""
