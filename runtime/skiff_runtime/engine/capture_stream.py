"""Capture stream: the stream on which CUDA graphs are captured, while steps have another one.

Deferred graphs are captured between two steps, and meanwhile the scheduler's thread drops the results of earlier ones.
When their pinned memory is dropped, torch records an event on each stream that has used it. An event that is recorded on a
stream under capture becomes part of the capture; to query it, as torch does when it next allocates pinned memory, is an
error that ends the rank. No results are ever copied on the capture stream, so such an event is never recorded on it.
"""

from functools import cache

import torch


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of ``device`` for captures, so that graphs with the same memory pool share its memory.

    What is captured must have been run on another stream before, which compiles kernels and lets libraries set up what they
    must not under capture.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
