"""Real frontend processes (API, tokenizers, detokenizer), with the test in place of the supervisor and rank 0."""

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import EllipsisType
from typing import Final

import httpx
import numpy as np
from forked_processes import ForkedProcess, Program, fork_process
from tiny_config import write_config
from tiny_tokenizer import write_tokenizer
from tokenizers import Tokenizer

from skiff_runtime.config import Config
from skiff_runtime.messages import (
    NO_TOKEN,
    AbortRequest,
    AdapterLoaded,
    AdapterRefused,
    CacheEvents,
    FinishReason,
    FlushCache,
    Flushed,
    GenerateRequest,
    LoadAdapter,
    PhaseReport,
    PooledVector,
    PromptLogprobs,
    Ready,
    RequestFailed,
    ServiceReady,
    StepStats,
    StreamOpened,
    TokenBatch,
    TokenLogprobs,
    ToScheduler,
    ToSupervisor,
    UnloadAdapter,
    Wire,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.metrics.exposition import METRICS_TTL_SECONDS
from skiff_runtime.models.config import read_model_config
from skiff_runtime.processes.child_process import process_name
from skiff_runtime.processes.launch import Launch, Role, StartAdapter

NAME: Final = "tiny"
CONTEXT: Final = 512
HIDDEN: Final = 64
"""Size of the model's vectors."""
TIMEOUT_SECONDS: Final = 60.0
Row = tuple[int, int, FinishReason]


def write_model(directory: Path) -> Path:
    """Write a model directory without weights, because no engine runs."""
    write_config(directory)
    write_tokenizer(directory)
    return directory


class Rank:
    """The test in place of rank 0's scheduler: receives requests and sends output rows."""

    def __init__(self, endpoints: Endpoints, model: Path) -> None:
        self._inbox: Receiver[ToScheduler] = Receiver(endpoints.rank(0), ToScheduler)
        self._detokenizer = Sender(endpoints.detokenizer)
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def receive(self, timeout_seconds: float = TIMEOUT_SECONDS) -> ToScheduler:
        """Return the next message. Fails the test if none arrives in time."""
        message = self._inbox.receive(timeout_seconds)
        assert message is not None, "no message reached the scheduler"
        return message

    def request(self) -> GenerateRequest:
        """Return the next message, which must be a request."""
        message = self.receive()
        assert isinstance(message, GenerateRequest), message
        return message

    def poll(self) -> list[ToScheduler]:
        """Return the messages that are there or arrive soon."""
        first = self._inbox.receive(0.02)
        return [] if first is None else [first, *self._inbox.drain(10_000)]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt_ids(self, request: GenerateRequest) -> list[int]:
        return [int(token) for token in np.frombuffer(request.token_ids, dtype=Wire.TOKEN)]

    def start(self, *requests: GenerateRequest, cached: int = 0) -> None:
        """Report that these requests have been scheduled."""
        opened = [
            StreamOpened(
                r.uid,
                len(r.token_ids) // 4,
                cached,
                r.text,
                prompt_token_ids=r.token_ids if r.text.return_token_ids else b"",
                started_at=time.perf_counter(),
            )
            for r in requests
        ]
        self.step([], opened=opened)

    def step(
        self,
        rows: Sequence[Row],
        *,
        opened: Sequence[StreamOpened] = (),
        failed: Sequence[RequestFailed] = (),
        stats: StepStats | EllipsisType = ...,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[PromptLogprobs] = (),
        flushed: Sequence[Flushed] = (),
        pooled: Sequence[PooledVector] = (),
        cache_events: CacheEvents | None = None,
        adapters: Sequence[AdapterLoaded | AdapterRefused] = (),
    ) -> None:
        """Send the output of one step."""
        uids, tokens, finishes = zip(*rows, strict=True) if rows else ((), (), ())
        self._detokenizer.send(
            TokenBatch(
                opened=list(opened),
                uids=np.array(uids, dtype=Wire.UID).tobytes(),
                tokens=np.array(tokens, dtype=Wire.TOKEN).tobytes(),
                finishes=bytes(finishes),
                failed=list(failed),
                stats=StepStats() if stats is ... else stats,
                logprobs=list(logprobs),
                prompt_logprobs=list(prompt_logprobs),
                flushed=list(flushed),
                pooled=list(pooled),
                cache_events=cache_events,
                adapters=list(adapters),
            )
        )

    def generate(self, uid: int, text: str, finish: FinishReason = FinishReason.RUNNING) -> None:
        """Send the tokens of ``text``, one per step; the last one has the finish reason ``finish``."""
        ids = self.encode(text)
        for token in ids[:-1]:
            self.step([(uid, token, FinishReason.RUNNING)])
        self.step([(uid, ids[-1], finish)])

    def finish(self, uid: int, finish: FinishReason = FinishReason.ABORT) -> None:
        self.step([(uid, NO_TOKEN, finish)])

    def finish_pooled(self, request: GenerateRequest) -> None:
        """End a request with pooling by ``vector_of`` its prompt."""
        labels = () if request.pooling is None else request.pooling.token_ids
        vector = vector_of(self.prompt_ids(request), labels)
        pooled = PooledVector(request.uid, np.array(vector, Wire.VECTOR).tobytes())
        self.step([(request.uid, NO_TOKEN, FinishReason.STOP)], pooled=[pooled])

    def close(self) -> None:
        self._inbox.close()
        self._detokenizer.close()


def vector_of(prompt: Sequence[int], labels: Sequence[int] = ()) -> list[float]:
    """Return a vector by which a test recognizes the prompt; with ``labels`` a logit for each of them."""
    if labels:
        return [float((len(prompt) * label) % 7) - 3.0 for label in labels]
    return [float(len(prompt)), float(prompt[0]), float(prompt[-1]), -1.0] * (HIDDEN // 4)


class Echo(threading.Thread):
    """Serves every request by repeating its prompt, one token per step for all running requests.

    A request with pooling gets ``vector_of`` its prompt. An adapter is refused if its path contains ``refused``.
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__(daemon=True)
        self._rank = rank
        self._running: dict[int, list[int]] = {}
        self._stop_it = threading.Event()
        self.aborted: list[int] = []
        self.requests: list[GenerateRequest] = []
        self.adapters: dict[int, LoadAdapter] = {}
        """Those that are loaded, by id."""

    def run(self) -> None:
        while not self._stop_it.is_set():
            self._handle(self._rank.poll())
            rows = []
            for uid, left in list(self._running.items()):
                token = left.pop(0)
                rows.append((uid, token, FinishReason.RUNNING if left else FinishReason.LENGTH))
                if not left:
                    del self._running[uid]
            if rows:
                self._rank.step(rows, stats=StepStats(running=len(rows), decode_tokens=len(rows)))

    def _handle(self, messages: list[ToScheduler]) -> None:
        for message in messages:
            if isinstance(message, GenerateRequest):
                self.requests.append(message)
                self._rank.start(message)
                if message.pooling is not None:
                    self._rank.finish_pooled(message)
                    continue
                self._running[message.uid] = self._rank.prompt_ids(message)
            elif isinstance(message, FlushCache):
                self._rank.step([], flushed=[Flushed(message.uid, pages=3, running=len(self._running))])
            elif isinstance(message, LoadAdapter):
                self._load(message)
            elif isinstance(message, UnloadAdapter):
                self.adapters.pop(message.adapter_id, None)
            elif isinstance(message, AbortRequest) and self._running.pop(message.uid, None) is not None:
                self.aborted.append(message.uid)
                self._rank.finish(message.uid, message.finish)

    def _load(self, message: LoadAdapter) -> None:
        reply: AdapterLoaded | AdapterRefused = AdapterLoaded(message.uid, message.adapter_id)
        if "refused" in message.path:
            reply = AdapterRefused(
                message.uid, message.adapter_id, "its rank is 64, and --max-lora-rank is 16"
            )
        else:
            self.adapters[message.adapter_id] = message
        self._rank.step([], adapters=[reply])

    def stop(self) -> None:
        self._stop_it.set()
        self.join()


@dataclass
class Frontend:
    """Running frontend processes."""

    endpoints: Endpoints
    rank: Rank
    api: Sender
    supervisor: "Receiver[object]"
    processes: dict[str, ForkedProcess]
    url: str = ""
    echo: Echo | None = None
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=TIMEOUT_SECONDS, verify=False))

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(self.url + path, json=body)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(self.url + path)

    def metric(self, line: str) -> float:
        """Return the value of the metric sample whose name and labels are ``line``."""
        time.sleep(METRICS_TTL_SECONDS)  # until a cached page has expired
        page = self.get("/metrics").text.splitlines()
        [value] = [each.rpartition(" ")[2] for each in page if each.startswith(line + " ")]
        return float(value)

    def wait_exit(self, name: str = "api") -> int:
        return self.processes[name].wait(TIMEOUT_SECONDS)


def answer(response: httpx.Response) -> tuple[str, str]:
    """Return text and finish reason of a chat completion with one choice, streamed or not."""
    assert response.status_code == 200, response.text
    if "event-stream" not in response.headers["content-type"]:
        [choice] = response.json()["choices"]
        return choice["message"]["content"], choice["finish_reason"]
    events = response.text.strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    [reason] = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), reason


@contextmanager
def running_frontend(
    model: Path, *, ready: bool = True, adapters: tuple[StartAdapter, ...] = (), **options: object
) -> Iterator[Frontend]:
    """Start the frontend processes on a free port; afterwards kill them and delete their files."""
    config = Config(model=str(model), port=0, served_model_name=NAME, max_model_len=CONTEXT)
    config = replace(config, log_level="debug", **options)  # type: ignore[arg-type]
    run_dir = Path(tempfile.mkdtemp(prefix="skiff-test-"))
    launch = Launch(config=config, model=read_model_config(model), run_dir=run_dir, adapters=adapters)
    launch.write()
    endpoints = Endpoints(run_dir)
    supervisor: Receiver[object] = Receiver(endpoints.supervisor, ToSupervisor)
    front = Frontend(endpoints, Rank(endpoints, model), Sender(endpoints.api), supervisor, {})
    try:
        for role, index in _roles(config.tokenizer_worker_num):
            front.processes[process_name(role, index)] = fork_process(
                Program.CHILD, role, str(index), str(run_dir)
            )
        front.url = f"http://127.0.0.1:{_await_ready(front)}"
        if ready:
            front.api.send(ServiceReady(kv_tokens=1024))
            _await(lambda: front.get("/readyz").status_code == 200)
        yield front
    finally:
        for process in front.processes.values():
            process.kill()
            process.wait()
        front.http.close()
        front.rank.close()
        front.api.close()
        supervisor.close()
        shutil.rmtree(run_dir)


@contextmanager
def echoing_frontend(model: Path, **options: object) -> Iterator[Frontend]:
    """Start the frontend processes, with an ``Echo`` behind them."""
    with running_frontend(model, **options) as front:  # type: ignore[arg-type]
        front.echo = echo = Echo(front.rank)
        echo.start()
        yield front
        echo.stop()


def _roles(tokenizers: int) -> list[tuple[Role, int]]:
    return [
        (Role.API, 0),
        (Role.DETOKENIZER, 0),
        *((Role.TOKENIZER, index) for index in range(tokenizers)),
    ]


def _await_ready(front: Frontend) -> int:
    """Wait until every process is ready, passing on phases as the supervisor does. Returns the API's port."""
    ports: dict[str, int] = {}
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(ports) < len(front.processes):
        assert time.monotonic() < deadline, f"only {sorted(ports)} are ready"
        message = front.supervisor.receive(0.2)
        if isinstance(message, Ready):
            ports[message.process] = message.port
        elif isinstance(message, PhaseReport):
            front.api.send(message)
    return ports["api"]


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
