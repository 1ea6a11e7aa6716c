"""``skiff bench path``: cost of the serving path, with a stub in the place of scheduler and engine."""

from skiff_runtime.bench.path.serving_path import add_arguments, run

__all__ = ["add_arguments", "run"]
