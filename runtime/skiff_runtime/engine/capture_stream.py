"""Capture stream: the stream on which CUDA graphs are captured, while steps have another one.

Deferred graphs are captured between two steps, and meanwhile the scheduler's thread drops the results of earlier ones.
When their pinned memory is dropped, torch records an event on each stream that has used it. An event that is recorded on a
stream under capture becomes part of the capture; to query it, as torch does when it next allocates pinned memory, is an
error that ends the rank. No results are ever copied on the capture stream, so such an event is never recorded on it.
"""

from functools import cache

import torch


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for captures, which is not the current one, on which steps run.

    For the same current stream it is always the same, so that graphs with the same memory pool share its memory. What is
    captured must have been run on the current stream before, which compiles kernels and lets libraries set up what they
    must not under capture.
    """
    current = torch.cuda.current_stream(device)
    return next(stream for stream in _streams(device) if stream != current)


@cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return two streams: torch has 32 in all and begins again with the first, so the current one may be among them."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
