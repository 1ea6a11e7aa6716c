"""``skiff bench routing``: the router's policies in a simulated cluster, beside others and an oracle."""

from skiff_runtime.bench.routing.command import add_arguments, run

__all__ = ["add_arguments", "run"]
