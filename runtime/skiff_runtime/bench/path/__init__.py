"""``skiff bench path``: the real API, tokenizer and detokenizer processes, with a stub in the scheduler's place."""

from skiff_runtime.bench.path.command import add_arguments, run

__all__ = ["add_arguments", "run"]
