"""What a model is and what it needs, before anything is downloaded or loaded.

Here belongs ``skiff info``: the reckoning of memory against GPUs, and its table. No torch.
"""

from skiff_runtime.info.command import add_arguments, run

__all__ = ["add_arguments", "run"]
