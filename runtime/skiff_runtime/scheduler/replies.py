"""What clients are to be told, gathered into one columnar ``TokenBatch``."""

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.messages import (
    NO_TOKEN,
    Finish,
    RequestFailed,
    StepStats,
    StreamOpened,
    TokenBatch,
    Wire,
)


class Replies:
    """Rows in the order in which they came about; at most one a request in each batch."""

    def __init__(self) -> None:
        self._opened: list[StreamOpened] = []
        self._failed: list[RequestFailed] = []
        self._uids: list[bytes] = []
        self._tokens: list[bytes] = []
        self._finishes: list[bytes] = []

    @property
    def empty(self) -> bool:
        return not (self._opened or self._failed or self._uids)

    def open(self, opened: list[StreamOpened]) -> None:
        """Requests that were admitted to run."""
        self._opened.extend(opened)

    def fail(self, failed: RequestFailed) -> None:
        """A request that never ran."""
        self._failed.append(failed)

    def rows(self, uids: NDArray[np.int64], tokens: NDArray[np.int32], finishes: NDArray[np.uint8]) -> None:
        """New tokens, and which of them end their request."""
        self._uids.append(uids.astype(Wire.UID, copy=False).tobytes())
        self._tokens.append(tokens.astype(Wire.TOKEN, copy=False).tobytes())
        self._finishes.append(finishes.astype(Wire.FINISH, copy=False).tobytes())

    def end(self, uid: int, finish: Finish) -> None:
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
        )
        self._opened, self._failed = [], []
        self._uids, self._tokens, self._finishes = [], [], []
        return batch
