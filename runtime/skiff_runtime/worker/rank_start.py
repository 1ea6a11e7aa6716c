"""The first part of a rank's process: what can begin before torch is imported, which takes seconds.

``rank`` imports torch and everything else that a rank needs, so it is imported here only after the rest has begun.
"""

from skiff_runtime.processes.child_process import Child
from skiff_runtime.worker.checkpoint_prefetch import prefetch_checkpoint


def run(child: Child) -> None:
    """Start to prefetch the weights, then import the rank and run it."""
    config, model = child.launch.config, child.launch.model
    if config.load_format != "dummy":
        prefetch_checkpoint(model.path, tp_rank=child.index, tp_size=config.tp_size)
    from skiff_runtime.worker import rank

    rank.run(child)
