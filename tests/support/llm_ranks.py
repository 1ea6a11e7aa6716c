"""The rank processes of an ``LLM`` in this process, which are identified among its children by the run directory."""

from contextlib import suppress

import psutil

from skiff_runtime import LLM


def ranks_of(llm: LLM) -> list[psutil.Process]:
    """Return the LLM's rank processes, by rank."""
    run_dir = str(llm._engine.launch.run_dir)
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # a child that has ended has no command line
            words = child.cmdline()
            if run_dir in words:
                found[int(words[words.index(run_dir) - 1])] = child
    return [found[rank] for rank in sorted(found)]
