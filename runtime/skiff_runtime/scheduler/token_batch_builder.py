"""What clients are to be told, gathered into one columnar ``TokenBatch``."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from skiff_runtime.messages import (
    NO_TOKEN,
    FinishReason,
    Flushed,
    PromptLogprobs,
    RequestFailed,
    StepStats,
    StreamOpened,
    TokenBatch,
    TokenLogprobs,
    Wire,
)
from skiff_runtime.scheduler import logprobs_messages as logprobs
from skiff_runtime.scheduler.request import Request


class Replies:
    """Rows in the order in which they came about; at most one a request in each batch."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._opened: list[StreamOpened] = []
        self._failed: list[RequestFailed] = []
        self._uids: list[bytes] = []
        self._tokens: list[bytes] = []
        self._finishes: list[bytes] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompts: list[PromptLogprobs] = []
        self._flushed: list[Flushed] = []
        self._count = 0

    @property
    def empty(self) -> bool:
        return not (self._opened or self._failed or self._uids or self._flushed)

    def open(self, request: Request) -> None:
        """A request that was admitted to run."""
        self._opened.append(
            StreamOpened(
                request.uid,
                request.prompt_tokens,
                request.cached_tokens,
                request.text,
                request.sampling.min_tokens,
            )
        )
        first = logprobs.build_first_prompt_logprobs(request)
        if first is not None:
            self._prompts.append(first)

    def fail(self, failed: RequestFailed) -> None:
        """A request that was refused, or that cannot go on."""
        self._failed.append(failed)

    def flush(self, flushed: Flushed) -> None:
        """The cache was flushed."""
        self._flushed.append(flushed)

    def prompt(self, told: PromptLogprobs) -> None:
        """What the model thought of a part of a prompt."""
        self._prompts.append(told)

    def rows(
        self,
        uids: NDArray[np.int64],
        tokens: NDArray[np.int32],
        finishes: NDArray[np.uint8],
        told: Sequence[TokenLogprobs] = (),
    ) -> None:
        """New tokens, which of them end their request, and what is ``told`` of them by their index."""
        self._logprobs.extend(replace(each, row=self._count + each.row) for each in told)
        self._count += len(uids)
        self._uids.append(uids.astype(Wire.UID, copy=False).tobytes())
        self._tokens.append(tokens.astype(Wire.TOKEN, copy=False).tobytes())
        self._finishes.append(finishes.astype(Wire.FINISH, copy=False).tobytes())

    def end(self, uid: int, finish: FinishReason) -> None:
        """A request that ends without a further token."""
        self.rows(np.array([uid]), np.array([NO_TOKEN], np.int32), np.array([finish], np.uint8))

    def take(self, stats: StepStats) -> TokenBatch:
        """All of it as one message; begin anew."""
        batch = TokenBatch(
            opened=self._opened,
            uids=b"".join(self._uids),
            tokens=b"".join(self._tokens),
            finishes=b"".join(self._finishes),
            failed=self._failed,
            stats=stats,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompts,
            flushed=self._flushed,
        )
        self._begin()
        return batch
