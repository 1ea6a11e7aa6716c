"""``skiff info``: a model's shape, its memory by part, and the GPUs that it fits. It imports no torch."""

from skiff_runtime.info.command import add_arguments, run

__all__ = ["add_arguments", "run"]
