"""The serving path of Mini-SGLang under the loads of ``skiff bench path``, beside Skiff's in the same run.

    PYTHONPATH=MINI_SGLANG/python python tests/peers/run_mini_sglang_path.py [--rounds 3] [--output-json FILE]

Mini-SGLang's own API server, tokenizer and detokenizer run as its launcher starts them, with a stub in the place of its
scheduler, as in Skiff's benchmark. Neither a GPU nor its kernels are needed: only the configuration class from which
its arguments derive is replaced, because that imports them.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from skiff_runtime.bench.cpu_time import ServiceProcess
from skiff_runtime.bench.path import serving_path
from skiff_runtime.bench.path.frontend_processes import FrontendProcesses
from skiff_runtime.bench.path.serving_path import PathBench, PathLoads
from skiff_runtime.bench.report import Figures, write_json
from skiff_runtime.config import Config
from skiff_runtime.processes.resolve import resolve

LOADS: Final = PathLoads(
    requests=2000,
    prompt_tokens=200,
    streams=256,
    stream_tokens=400,
    long_prompts=1,
    long_prompt_tokens=1000,
    step_seconds=0.01,
)
READY_SECONDS: Final = 120.0


@dataclass(frozen=True)
class SchedulerConfig:
    """In place of Mini-SGLang's class of this name: the model and the addresses, as it derives them."""

    model_path: str = ""
    suffix: str = ""

    @property
    def _unique_suffix(self) -> str:
        return self.suffix

    @property
    def zmq_backend_addr(self) -> str:
        return "ipc:///tmp/minisgl_0" + self.suffix

    @property
    def zmq_detokenizer_addr(self) -> str:
        return "ipc:///tmp/minisgl_1" + self.suffix


def make_arguments(model: str, suffix: str, port: int) -> Any:
    """Return Mini-SGLang's own arguments with its defaults: one process tokenizes and detokenizes."""
    scheduler = types.ModuleType("minisgl.scheduler")
    scheduler.SchedulerConfig = SchedulerConfig  # type: ignore[attr-defined]
    sys.modules["minisgl.scheduler"] = scheduler
    from minisgl.server.args import ServerArgs

    return ServerArgs(model_path=model, suffix=suffix, server_port=port)


def run_api(model: str, suffix: str, port: int) -> None:
    # Its access log goes to a terminal by default; a file is cheaper for it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    arguments = make_arguments(model, suffix, port)
    from minisgl.server.api_server import run_api_server

    run_api_server(arguments, lambda: None, False)


def run_tokenizer(model: str, suffix: str, port: int) -> None:
    arguments = make_arguments(model, suffix, port)
    from minisgl.tokenizer import tokenize_worker

    tokenize_worker(
        tokenizer_path=model,
        addr=arguments.zmq_detokenizer_addr,
        backend_addr=arguments.zmq_backend_addr,
        frontend_addr=arguments.zmq_frontend_addr,
        local_bs=1,
        create=arguments.tokenizer_create_addr,
        tokenizer_id=0,
    )


def run_stub(model: str, suffix: str, port: int, token: int) -> None:
    """Give every running request one token per step, on the grid of the monotonic clock, as Skiff's stub does."""
    arguments = make_arguments(model, suffix, port)
    from minisgl.message import (
        BaseBackendMsg,
        BaseTokenizerMsg,
        BatchBackendMsg,
        BatchTokenizerMsg,
        DetokenizeMsg,
        UserMsg,
    )
    from minisgl.utils import ZmqPullQueue, ZmqPushQueue

    inbox = ZmqPullQueue(arguments.zmq_backend_addr, create=True, decoder=BaseBackendMsg.decoder)
    outbox = ZmqPushQueue(
        arguments.zmq_detokenizer_addr,
        create=arguments.backend_create_detokenizer_link,
        encoder=BaseTokenizerMsg.encoder,
    )
    left: dict[int, int] = {}
    step = LOADS.step_seconds
    number = time.monotonic() // step + 1
    while True:
        while (wait := number * step - time.monotonic()) > 0:
            if inbox.socket.poll(int(wait * 1e3)):
                message = inbox.get()
                for each in message.data if isinstance(message, BatchBackendMsg) else [message]:
                    if isinstance(each, UserMsg):
                        left[each.uid] = each.sampling_params.max_tokens
            elif wait < 1e-3:
                time.sleep(wait)
        if left:
            left = {uid: count - 1 for uid, count in left.items()}
            rows = [DetokenizeMsg(uid, token, count == 0) for uid, count in left.items()]
            outbox.put(BatchTokenizerMsg(rows) if len(rows) > 1 else rows[0])
            left = {uid: count for uid, count in left.items() if count}
        number = max(number + 1, time.monotonic() // step)


@contextmanager
def mini_sglang(model: Path, token: int) -> Any:
    """Start the processes; yield what ``PathBench`` uses of Skiff's."""
    spawn, port, suffix = multiprocessing.get_context("spawn"), find_free_port(), f".pid={os.getpid()}"
    common = (str(model), suffix, port)
    started = {
        "stub": spawn.Process(target=run_stub, args=(*common, token), daemon=True),
        "tokenizer": spawn.Process(target=run_tokenizer, args=common, daemon=True),
        "api": spawn.Process(target=run_api, args=common, daemon=True),
    }
    try:
        for process in started.values():
            process.start()
        url = f"http://127.0.0.1:{port}"
        wait_ready(lambda: httpx.get(url + "/v1/models").is_success)
        watched = [
            ServiceProcess(name, name, psutil.Process(started[name].pid)) for name in ("api", "tokenizer")
        ]
        launch = types.SimpleNamespace(
            config=types.SimpleNamespace(served_model_name=str(model)),
            model=types.SimpleNamespace(tokenizer_path=model),
        )
        yield types.SimpleNamespace(url=url, watched=watched, launch=launch)
    finally:
        for process in started.values():
            process.kill()
            process.join()


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_ready(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "Mini-SGLang does not answer"
        time.sleep(0.1)


def measure_skiff(backend: Any, token: int) -> Figures:
    with FrontendProcesses(
        "demo://", tokenizer_worker_num=1, tokenizer_backend=backend, step_milliseconds=10.0, token=token
    ) as frontend:
        return PathBench(frontend, LOADS).run()


def measure_mini_sglang(token: int) -> Figures:
    source = resolve(Config(model="demo://"))[1].tokenizer_path
    with tempfile.TemporaryDirectory() as directory:
        for each in source.iterdir():
            if each.is_file() and each.suffix in (".json", ".jinja"):
                (Path(directory) / each.name).write_bytes(each.read_bytes())
        with mini_sglang(Path(directory), token) as frontend:
            return PathBench(frontend, LOADS).run()


def main() -> int:
    """Measure all in turns, and print the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-json", type=Path)
    arguments = parser.parse_args()
    token = serving_path.find_text_token("demo://")
    kinds: dict[str, Callable[[], Figures]] = {
        "Mini-SGLang": lambda: measure_mini_sglang(token),
        "Skiff, tokenizers": lambda: measure_skiff("tokenizers", token),
        "Skiff, fastokens": lambda: measure_skiff("fastokens", token),
    }
    found: dict[str, list[Figures]] = {name: [] for name in kinds}
    for _ in range(arguments.rounds):
        for name, measure in kinds.items():
            figures = measure()
            found[name].append(figures)
            print(name, describe([figures]), flush=True)
    for name, rounds in found.items():
        print(f"median of {arguments.rounds}: {name} {describe(rounds)}")
    if arguments.output_json is not None:
        write_json(arguments.output_json, found)
    return 0


def describe(rounds: list[Figures]) -> str:
    """Return CPU-microseconds a request and a token of all processes, medians of the rounds."""
    request, token = (
        statistics.median(each[load]["us_together"] for each in rounds) for load in ("requests", "streams")
    )
    rate = statistics.median(each["streams"]["tokens_per_second"] for each in rounds)
    return f"{request:.0f} us a request, {token:.2f} us a token, {rate:,.0f} tokens/s"


if __name__ == "__main__":
    sys.exit(main())
