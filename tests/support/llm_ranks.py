"""The processes behind an ``LLM`` of this process, which may have other children, of any ids."""

from contextlib import suppress

import psutil

from skiff_runtime import LLM


def ranks_of(llm: LLM) -> list[psutil.Process]:
    """Its ranks, in their order."""
    run_dir = str(llm._backend.launch.run_dir)
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # one that has ended tells nothing
            told = child.cmdline()
            if run_dir in told:
                found[int(told[told.index(run_dir) - 1])] = child
    return [found[rank] for rank in sorted(found)]
