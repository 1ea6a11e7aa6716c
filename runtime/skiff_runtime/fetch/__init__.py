"""``skiff fetch``, which downloads a model and converts its tokenizer. It imports no torch: an init container runs it."""

from skiff_runtime.fetch.command import add_arguments, run

__all__ = ["add_arguments", "run"]
