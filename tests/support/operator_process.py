"""The operator as a real process for tests and the bench: start, look at its metrics, stop, kill."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import httpx
import psutil
import yaml
from apiserver import ApiServer
from forked_processes import ForkedProcess, Program, fork_process
from free_port import free_port
from prometheus_client.parser import text_string_to_metric_families

OWN_PACKAGES = [str(Path(__file__).parents[2] / name) for name in ("operator", "runtime")]
PACKAGES = OWN_PACKAGES
"""The directories from which operators are imported. Tests of upgrades replace them with those of another release."""
T = TypeVar("T")
LEASE_NAMESPACE = "skiff-system"
"""The operator's default."""


def eventually(
    look: Callable[[], T], what: str, timeout_seconds: float = 60.0, *, every_seconds: float = 0.05
) -> T:
    """The first true answer of `look`; fails with `what` when there is none in time."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer = look()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds:.0f} s: {what}; last seen: {answer!r}")
        time.sleep(every_seconds)


def token_kubeconfig(api: ApiServer, account: str, kubeconfig: Path) -> str:
    """Return the text of `kubeconfig` with a token of a ServiceAccount in `api`'s namespace for its user."""
    path = api.path("serviceaccounts", account, "token")
    token = api.request("POST", path, {"spec": {"expirationSeconds": 3600}})["status"]["token"]
    config = yaml.safe_load(kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    return json.dumps(config)


class OperatorProcess:
    """One `skiff-operator`; `environment` is added to this process's own.

    It is forked from a process that has imported the operator, unless it is of another release, or `forked` is False: a
    benchmark measures the command.
    """

    def __init__(
        self,
        kubeconfig: Path,
        log: Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        forked: bool = True,
    ) -> None:
        self.kubeconfig, self.log, self.forked = kubeconfig, log, forked
        self.flags, self.environment = flags, dict(environment or {})
        self.metrics_port = self.health_port = 0
        self._process: ForkedProcess | subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "OperatorProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, wait: bool = True) -> None:
        """Start it, and by default wait until it leads."""
        self.metrics_port, self.health_port = free_port(), free_port()
        ports = ["--metrics-port", str(self.metrics_port), "--health-port", str(self.health_port)]
        environment = {
            **os.environ,
            **self.environment,
            "KUBECONFIG": str(self.kubeconfig),
            "PYTHONPATH": os.pathsep.join(PACKAGES),
        }
        with self.log.open("ab") as out:
            self._process = (
                fork_process(Program.OPERATOR, *self.flags, *ports, environment=environment, output=out)
                if self.forked and PACKAGES == OWN_PACKAGES
                else subprocess.Popen(
                    [sys.executable, "-m", "skiff_operator", *self.flags, *ports],
                    env=environment,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
        if wait:
            eventually(self.leads, "the operator leads")

    @property
    def process(self) -> psutil.Process:
        """The running process."""
        assert self._process is not None, "not started"
        return psutil.Process(self._process.pid)

    def leads(self) -> bool:
        """Return whether it holds the Lease and works. Raises when the process has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise AssertionError(f"the operator ended:\n{self.log.read_text()[-3000:]}")
        try:
            values = self.metrics()
        except httpx.HTTPError:
            return False
        return values.get("skiff_operator_last_resync_timestamp_seconds", 0) > 0

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics, by name and labels as `name{label=value,...}`."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", trust_env=False).text
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found

    def requests(self) -> dict[str, float]:
        """Requests to the API server so far by method; watches and kopf's own listing are not among them."""
        counts: dict[str, float] = {}
        for name, value in self.metrics().items():
            if name.startswith("skiff_operator_api_requests_total{"):
                method = name.partition("method=")[2].rstrip("}")
                counts[method] = counts.get(method, 0) + value
        return counts

    def writes(self) -> int:
        """Writes so far other than renewing the Lease."""
        return int(sum(count for method, count in self.requests().items() if method not in ("GET", "PUT")))

    def healthy(self) -> bool:
        """Return whether the liveness probe passes."""
        reply = httpx.get(f"http://127.0.0.1:{self.health_port}/healthz", trust_env=False)
        return reply.status_code == 200

    def wait(self, timeout_seconds: float = 60.0) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None, "not started"
        return self._process.wait(timeout_seconds)

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None, "not started"
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Stop it if it still runs, and print the end of its log, which pytest shows where a test failed."""
        with contextlib.suppress(AssertionError):
            self.stop()
        print(self.log.read_text()[-8000:])

    def stop(self) -> int:
        """SIGTERM, and SIGKILL when that takes long; the exit code."""
        assert self._process is not None, "not started"
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(15)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
