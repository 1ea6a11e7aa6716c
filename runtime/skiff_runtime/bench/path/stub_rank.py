"""A stand-in for rank 0: every running request gets one token each step, steps lie on a fixed grid of time.

Run as ``python -m skiff_runtime.bench.path.stub_rank RUN_DIR STEP_MS TOKEN``. Step k begins when the machine's
monotonic clock is k times the step, so a client can tell how old a token is without being told when it was sent.
"""

import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from skiff_runtime.messages import (
    AbortRequest,
    FinishReason,
    FlushCache,
    GenerateRequest,
    StepStats,
    StreamOpened,
    TokenBatch,
    ToScheduler,
    Wire,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender

TOKEN_BYTES: Final = Wire.TOKEN.itemsize
MAX_MESSAGES_PER_TURN: Final = 4096


class StubRank:
    """Answers requests with one and the same token, as many as they ask for."""

    def __init__(self, endpoints: Endpoints, token: int) -> None:
        self._inbox: Receiver[GenerateRequest | AbortRequest | FlushCache] = Receiver(
            endpoints.rank(0), ToScheduler
        )
        self._detokenizer = Sender(endpoints.detokenizer)
        self._token = token
        self._opened: list[StreamOpened] = []
        self._left: dict[int, int] = {}

    def serve(self, step_seconds: float) -> None:
        """Take steps for ever."""
        number = time.monotonic() // step_seconds + 1
        while True:
            self._take_until(number * step_seconds)
            if self._left:
                self._step(step_seconds)
            number = max(number + 1, time.monotonic() // step_seconds)

    def _take_until(self, moment: float) -> None:
        while (wait := moment - time.monotonic()) > 0:
            if self._inbox.socket.poll(int(wait * 1e3)):
                for message in self._inbox.drain(MAX_MESSAGES_PER_TURN):
                    self._take(message)
            elif wait < 1e-3:
                time.sleep(wait)

    def _take(self, message: GenerateRequest | AbortRequest | FlushCache) -> None:
        if isinstance(message, GenerateRequest):
            prompt = len(message.token_ids) // TOKEN_BYTES
            self._opened.append(StreamOpened(message.uid, prompt, 0, message.text))
            self._left[message.uid] = max(1, message.sampling.max_tokens)
        elif isinstance(message, AbortRequest) and message.uid in self._left:
            self._left[message.uid] = 1

    def _step(self, seconds: float) -> None:
        uids = np.fromiter(self._left, Wire.UID, len(self._left))
        left = np.fromiter(self._left.values(), np.int64, len(self._left)) - 1
        self._left = {uid: count for uid, count in zip(uids.tolist(), left.tolist(), strict=True) if count}
        finishes = np.where(left > 0, FinishReason.RUNNING, FinishReason.LENGTH).astype(Wire.FINISH)
        stats = StepStats(running=len(uids), step_seconds=seconds, decode_tokens=len(uids))
        self._detokenizer.send(
            TokenBatch(
                opened=self._opened,
                uids=uids.tobytes(),
                tokens=np.full(len(uids), self._token, Wire.TOKEN).tobytes(),
                finishes=finishes.tobytes(),
                failed=[],
                stats=stats,
            )
        )
        self._opened = []


def main(run_dir: str, step_milliseconds: str, token: str) -> None:
    """Serve one run directory until killed."""
    StubRank(Endpoints(Path(run_dir)), int(token)).serve(float(step_milliseconds) / 1e3)


if __name__ == "__main__":
    main(*sys.argv[1:])
