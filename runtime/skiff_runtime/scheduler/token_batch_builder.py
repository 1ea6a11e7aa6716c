"""The builder of a ``TokenBatch``: results for clients, gathered into columns."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from skiff_runtime.messages import (
    NO_TOKEN,
    AdapterLoaded,
    AdapterRefused,
    CacheEvents,
    FinishReason,
    Flushed,
    PooledVector,
    PromptLogprobs,
    RequestFailed,
    StepStats,
    StreamOpened,
    TokenBatch,
    TokenLogprobs,
    Wire,
)
from skiff_runtime.scheduler.logprobs_messages import build_first_prompt_logprobs
from skiff_runtime.scheduler.request import Request


class TokenBatchBuilder:
    """Gathers rows in the order of their calls; a request has at most one row in each batch."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._opened: list[StreamOpened] = []
        self._failed: list[RequestFailed] = []
        self._uids: list[bytes] = []
        self._tokens: list[bytes] = []
        self._finish_reasons: list[bytes] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._flushed: list[Flushed] = []
        self._pooled: list[PooledVector] = []
        self._adapters: list[AdapterLoaded | AdapterRefused] = []
        self._num_rows = 0

    @property
    def is_empty(self) -> bool:
        return not (self._opened or self.has_answers)

    @property
    def has_answers(self) -> bool:
        """True if there are rows, failures, or replies to flushes and to loads of adapters."""
        return bool(self._failed or self._uids or self._flushed or self._adapters)

    def add_opened(self, request: Request, started_at: float) -> None:
        """Add a request that runs for the first time, in a step that is launched at ``started_at`` (``perf_counter``)."""
        prompt = b""
        if request.text.return_token_ids:
            prompt = request.tokens[: request.prompt_tokens].astype(Wire.TOKEN, copy=False).tobytes()
        self._opened.append(
            StreamOpened(
                request.uid,
                request.prompt_tokens,
                request.cached_tokens,
                request.text,
                request.sampling.min_tokens,
                prompt,
                started_at,
            )
        )
        first = build_first_prompt_logprobs(request)
        if first is not None:
            self._prompt_logprobs.append(first)

    def add_failure(self, failed: RequestFailed) -> None:
        """Add a request that was refused, or that cannot continue."""
        self._failed.append(failed)

    def add_flush(self, flushed: Flushed) -> None:
        """Add the result of a flush of the prefix cache."""
        self._flushed.append(flushed)

    def add_adapter(self, reply: AdapterLoaded | AdapterRefused) -> None:
        """Add the reply to the load of an adapter."""
        self._adapters.append(reply)

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        """Add log-probabilities of a part of a prompt."""
        self._prompt_logprobs.append(logprobs)

    def add_tokens(
        self,
        uids: NDArray[np.int64],
        tokens: NDArray[np.int32],
        finish_reasons: NDArray[np.uint8],
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Add one row for each index; the rows of ``logprobs`` count from the first row added here."""
        self._logprobs.extend(replace(each, row=self._num_rows + each.row) for each in logprobs)
        self._num_rows += len(uids)
        self._uids.append(uids.astype(Wire.UID, copy=False).tobytes())
        self._tokens.append(tokens.astype(Wire.TOKEN, copy=False).tobytes())
        self._finish_reasons.append(finish_reasons.astype(Wire.FINISH, copy=False).tobytes())

    def add_vector(self, uid: int, vector: NDArray[np.float32]) -> None:
        """Add a request that ends with its vector."""
        self._pooled.append(PooledVector(uid, vector.astype(Wire.VECTOR, copy=False).tobytes()))
        self.add_end(uid, FinishReason.STOP)

    def add_end(self, uid: int, reason: FinishReason) -> None:
        """Add a request that ends without a further token."""
        self.add_tokens(np.array([uid]), np.array([NO_TOKEN], np.int32), np.array([reason], np.uint8))

    def take(self, stats: StepStats, cache_events: CacheEvents | None = None) -> TokenBatch:
        """Return everything gathered as one message, and start a new one."""
        batch = TokenBatch(
            opened=self._opened,
            uids=b"".join(self._uids),
            tokens=b"".join(self._tokens),
            finishes=b"".join(self._finish_reasons),
            failed=self._failed,
            stats=stats,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            flushed=self._flushed,
            pooled=self._pooled,
            cache_events=cache_events,
            adapters=self._adapters,
        )
        self._reset()
        return batch
