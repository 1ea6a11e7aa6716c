"""Front-end processes of a service, started as by its supervisor, with a stub in the place of the ranks."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx
import psutil
import zmq

from skiff_runtime import contract
from skiff_runtime.bench.cpu_time import ServiceProcess, identify_child
from skiff_runtime.config import Config, TokenizerBackend
from skiff_runtime.errors import StartupError
from skiff_runtime.messages import Heartbeat, PhaseReport, Ready, ServiceReady, ToSupervisor
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.processes.child_process import process_name
from skiff_runtime.processes.children import Children, make_run_dir
from skiff_runtime.processes.launch import Launch, Role
from skiff_runtime.processes.resolve import resolve

CONTEXT: Final = 1 << 16
READY_SECONDS: Final = 60.0
END_SECONDS: Final = 5.0
_STUB: Final = "skiff_runtime.bench.path.stub_rank"


class FrontendProcesses:
    """API, tokenizer and detokenizer processes of one model, whose context is set to 65,536 tokens.

    ``watched`` contains them, but not the stub of rank 0.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer_worker_num: int,
        tokenizer_backend: TokenizerBackend,
        step_milliseconds: float,
        token: int,
    ) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="skiff-bench-")
        self._stub = [str(step_milliseconds), str(token)]
        directory = _copy_with_context(resolve(Config(model=model))[1].path, Path(self._files.name))
        config = Config(
            model=str(directory),
            port=0,
            tokenizer_worker_num=tokenizer_worker_num,
            tokenizer_backend=tokenizer_backend,
            max_running_requests=4096,
            log_level="warning",
        )
        resolved, described = resolve(config)
        self.launch = Launch(config=resolved, model=described, run_dir=make_run_dir())
        self.launch.write()
        self.watched: list[ServiceProcess] = []
        self.url = ""

    def __enter__(self) -> Self:
        endpoints = Endpoints(self.launch.run_dir)
        self._inbox: Receiver[Heartbeat | PhaseReport | Ready] = Receiver(endpoints.supervisor, ToSupervisor)
        self._api = Sender(endpoints.api)
        self._children = Children(self.launch, zmq.Poller())
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        roles = [(Role.API, 0), (Role.DETOKENIZER, 0)]
        roles += [(Role.TOKENIZER, index) for index in range(self.launch.config.tokenizer_worker_num)]
        names = {self._children.spawn(role, index) for role, index in roles}
        self._rank = subprocess.Popen([sys.executable, "-m", _STUB, str(self.launch.run_dir), *self._stub])
        ports = self._await_ready(names)
        self.url = f"http://127.0.0.1:{ports[process_name(Role.API, 0)]}"
        self._api.send(ServiceReady(kv_tokens=1 << 30))
        while httpx.get(f"{self.url}{contract.PATH_READYZ}").status_code != HTTPStatus.OK:
            time.sleep(0.01)
        found = filter(None, map(identify_child, psutil.Process(os.getpid()).children()))
        self.watched = sorted(found, key=lambda each: each.name)

    def _await_ready(self, awaited: set[str]) -> dict[str, int]:
        ports: dict[str, int] = {}
        deadline = time.monotonic() + READY_SECONDS
        while awaited - ports.keys():
            ended = self._children.reap()
            if ended or time.monotonic() > deadline:
                missing = ", ".join(sorted(awaited - ports.keys()))
                raise StartupError(f"not ready: {missing} {' '.join(map(str, ended))}".rstrip())
            message = self._inbox.receive(0.2)
            if isinstance(message, Ready):
                ports[message.process] = message.port
        return ports

    def close(self) -> None:
        """End all processes and remove their files."""
        self._children.terminate(END_SECONDS)
        if hasattr(self, "_rank"):
            self._rank.kill()
            self._rank.wait()
        self._inbox.close()
        self._api.close()
        shutil.rmtree(self.launch.run_dir, ignore_errors=True)
        self._files.cleanup()


def _copy_with_context(model: Path, copy: Path) -> Path:
    """Copy the model's files but its weights, and set a context that is long enough for long prompts."""
    for each in model.iterdir():
        if each.is_file() and each.suffix != ".safetensors":
            (copy / each.name).write_bytes(each.read_bytes())
    path = copy / "config.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "max_position_embeddings": CONTEXT}))
    return copy
