"""A step's results on their way from the device to the host."""

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from skiff_runtime.engine.logprobs import DevicePromptLogprobs, Told
from skiff_runtime.step import Int32, Logprobs, PromptLogprobsOutput, StepResult

POLL_SECONDS: Final = 50e-6
"""CUDA waits for an event for ever or not at all."""
NO_ROWS: Int32 = np.empty(0, np.int32)


class Arrival:
    """Copies what a step brought; on a GPU an event tells when all of it has arrived."""

    def __init__(
        self,
        tokens: torch.Tensor,
        logprob_rows: Int32 = NO_ROWS,
        logprobs: Told | None = None,
        prompts: Sequence[DevicePromptLogprobs] = (),
    ) -> None:
        """``tokens`` int[S], on a CPU not to be changed any more; the others as in ``step.StepResult``."""
        self._tokens = _to_host(tokens.int())
        self._logprob_rows = logprob_rows
        self._logprobs = None if logprobs is None else _told_to_host(logprobs)
        self._prompts = [
            DevicePromptLogprobs(chunk.slot, chunk.start, _told_to_host(chunk.told)) for chunk in prompts
        ]
        self._event: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all has arrived, but no longer than this; whether it has."""
        deadline = time.monotonic() + timeout_seconds
        while self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def tokens(self) -> Int32:
        """Wait for them; int32[S]. May be asked for in any thread, and more than once."""
        if self._event is not None:
            self._event.synchronize()
        tokens: Int32 = self._tokens.numpy()
        return tokens

    def result(self) -> StepResult:
        """Wait for all of it."""
        return StepResult(
            tokens=self.tokens(),
            logprob_rows=self._logprob_rows,
            logprobs=None if self._logprobs is None else _numpy(self._logprobs),
            prompts=tuple(
                PromptLogprobsOutput(chunk.slot, chunk.start, _numpy(chunk.told)) for chunk in self._prompts
            ),
        )


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _told_to_host(told: Told) -> Told:
    return Told(_to_host(told.chosen), _to_host(told.top_ids), _to_host(told.top))


def _numpy(told: Told) -> Logprobs:
    return Logprobs(told.chosen.numpy(), told.top_ids.numpy(), told.top.numpy())
