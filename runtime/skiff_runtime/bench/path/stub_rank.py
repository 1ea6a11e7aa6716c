"""Stub of rank 0 that gives every running request one token per step, at a fixed rate of steps.

``python -m skiff_runtime.bench.path.stub_rank RUN_DIR STEP_MS TOKEN``. Step k begins when the machine's monotonic
clock is at k times the duration of a step, so that a client can compute the age of a token without its time stamp.
"""

import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

from skiff_runtime.messages import (
    AbortRequest,
    FinishReason,
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
    """Answers each request with ``max_tokens`` copies of one token."""

    def __init__(self, endpoints: Endpoints, token: int) -> None:
        self._inbox: Receiver[ToScheduler] = Receiver(endpoints.rank(0), ToScheduler)
        self._detokenizer = Sender(endpoints.detokenizer)
        self._token = token
        self._new_streams: list[StreamOpened] = []
        self._remaining: dict[int, int] = {}

    def serve(self, step_seconds: float) -> None:
        """Run steps forever."""
        number = time.monotonic() // step_seconds + 1
        while True:
            self._receive_until(number * step_seconds)
            if self._remaining:
                self._step(step_seconds)
            number = max(number + 1, time.monotonic() // step_seconds)

    def _receive_until(self, moment: float) -> None:
        while (wait := moment - time.monotonic()) > 0:
            if self._inbox.socket.poll(int(wait * 1e3)):
                for message in self._inbox.drain(MAX_MESSAGES_PER_TURN):
                    self._accept(message)
            elif wait < 1e-3:
                time.sleep(wait)

    def _accept(self, message: ToScheduler) -> None:
        if isinstance(message, GenerateRequest):
            prompt = len(message.token_ids) // TOKEN_BYTES
            self._new_streams.append(StreamOpened(message.uid, prompt, 0, message.text))
            self._remaining[message.uid] = max(1, message.sampling.max_tokens)
        elif isinstance(message, AbortRequest) and message.uid in self._remaining:
            self._remaining[message.uid] = 1

    def _step(self, seconds: float) -> None:
        uids = np.fromiter(self._remaining, Wire.UID, len(self._remaining))
        left = np.fromiter(self._remaining.values(), np.int64, len(self._remaining)) - 1
        self._remaining = {
            uid: count for uid, count in zip(uids.tolist(), left.tolist(), strict=True) if count
        }
        finishes = np.where(left > 0, FinishReason.RUNNING, FinishReason.LENGTH).astype(Wire.FINISH)
        stats = StepStats(running=len(uids), step_seconds=seconds, decode_tokens=len(uids))
        self._detokenizer.send(
            TokenBatch(
                opened=self._new_streams,
                uids=uids.tobytes(),
                tokens=np.full(len(uids), self._token, Wire.TOKEN).tobytes(),
                finishes=finishes.tobytes(),
                failed=[],
                stats=stats,
            )
        )
        self._new_streams = []


def main(run_dir: str, step_milliseconds: str, token: str) -> None:
    """Serve the ranks' address of a run directory until killed."""
    StubRank(Endpoints(Path(run_dir)), int(token)).serve(float(step_milliseconds) / 1e3)


if __name__ == "__main__":
    main(*sys.argv[1:])
