"""Results of a step on their way from the device to the host."""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from skiff_runtime.engine.logprobs import DeviceLogprobs, DevicePromptLogprobs
from skiff_runtime.engine.pooler import DevicePooled
from skiff_runtime.step import Int32, LogprobsOutput, PooledOutput, PromptLogprobsOutput, StepResult

POLL_SECONDS: Final = 50e-6
"""CUDA can wait for an event without a limit or not at all, so a wait with a limit polls."""
NO_ROWS: Int32 = np.empty(0, np.int32)


class StepOutput:
    """Copies the results of a step to the host; on a GPU an event reports when all of them have arrived."""

    def __init__(
        self,
        tokens: torch.Tensor,
        logprob_rows: Int32 = NO_ROWS,
        logprobs: DeviceLogprobs | None = None,
        prompts: Sequence[DevicePromptLogprobs] = (),
        pooled: Sequence[DevicePooled] = (),
    ) -> None:
        """Start the copies. On a CPU, ``tokens`` int[S] must not change afterwards; the rest is as in ``StepResult``."""
        self._tokens = _to_host(tokens.int())
        self._logprob_rows = logprob_rows
        self._logprobs = None if logprobs is None else _logprobs_to_host(logprobs)
        self._prompts = [
            DevicePromptLogprobs(chunk.slot, chunk.start, _logprobs_to_host(chunk.logprobs))
            for chunk in prompts
        ]
        self._pooled = [DevicePooled(each.slots, _to_host(each.vectors)) for each in pooled]
        self._event: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until everything has arrived, at most this long; return whether it has."""
        deadline = time.monotonic() + timeout_seconds
        while self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def tokens(self) -> Int32:
        """Wait for the tokens and return them, int32[S]. Callable from any thread, any number of times."""
        if self._event is not None:
            self._event.synchronize()
        tokens: Int32 = self._tokens.numpy()
        return tokens

    def result(self) -> StepResult:
        """Wait for everything, and return it."""
        return StepResult(
            tokens=self.tokens(),
            logprob_rows=self._logprob_rows,
            logprobs=None if self._logprobs is None else _to_numpy(self._logprobs),
            prompt_logprobs=tuple(
                PromptLogprobsOutput(chunk.slot, chunk.start, _to_numpy(chunk.logprobs))
                for chunk in self._prompts
            ),
            pooled=tuple(PooledOutput(each.slots, each.vectors.numpy()) for each in self._pooled),
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor
    # Pinned, because a copy to pageable memory would make the host wait.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _logprobs_to_host(logprobs: DeviceLogprobs) -> DeviceLogprobs:
    return DeviceLogprobs(
        _to_host(logprobs.token_logprobs),
        _to_host(logprobs.top_ids),
        _to_host(logprobs.top_logprobs),
        None if logprobs.token_ranks is None else _to_host(logprobs.token_ranks),
    )


def _to_numpy(logprobs: DeviceLogprobs) -> LogprobsOutput:
    return LogprobsOutput(
        logprobs.token_logprobs.numpy(),
        logprobs.top_ids.numpy(),
        logprobs.top_logprobs.numpy(),
        None if logprobs.token_ranks is None else logprobs.token_ranks.numpy(),
    )
