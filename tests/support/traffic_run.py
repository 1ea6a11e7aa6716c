"""A run of the traffic driver in a pod: started, marked and stopped from outside.

The driver is a background process of the pod, so that it goes on when the API server, through which `kubectl exec` reaches the pod,
does not answer.
"""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import traffic
from kube import Kube, KubectlError, wait

SOURCE: Final = Path(traffic.__file__)
DRIVER: Final = "/tmp/traffic.py"
START_SECONDS: Final = 30
LONGEST_SECONDS: Final = 3600
RECORD_SECONDS: Final = 240


class TrafficRun:
    """One run of the driver. Two at a time need two names and two ports."""

    def __init__(self, kube: Kube, pod: str, *, name: str = "traffic", port: int = 8700) -> None:
        self._kube = kube
        self._pod = pod
        self._name = name
        self._url = f"http://127.0.0.1:{port}"
        self._port = port

    def record(self, url: str, model: str, revision: str) -> None:
        """Record the right answers of a revision of the model, for runs in this pod."""
        self._copy()
        answers = self._kube.execute(
            self._pod, "python3", DRIVER, "record", url, model, timeout_seconds=RECORD_SECONDS
        )
        self._kube.execute(self._pod, "sh", "-c", f"cat > {_answers(revision)}", text=answers)

    def start(
        self, url: str, model: str, *, rate: float, revisions: tuple[str, ...], retries: int = 0
    ) -> None:
        """Start sending, and return once the driver takes marks."""
        self._copy()
        words = ["python3", DRIVER, "run", url, model, f"--rate={rate}", f"--retries={retries}"]
        words += [f"--control-port={self._port}", f"--seconds={LONGEST_SECONDS}"]
        words += [f"--answers={_answers(each)}" for each in revisions]
        log = f"/tmp/{self._name}.log"
        self._kube.execute(self._pod, "sh", "-c", f"{shlex.join(words)} > /dev/null 2> {log} < /dev/null &")
        wait(self._takes_marks, timeout_seconds=START_SECONDS, explain=lambda: self._log(log))

    def mark(self, window: str) -> None:
        """Begin a window."""
        self._control("POST", f"/windows/{window.replace(' ', '%20')}")

    def report(self) -> dict[str, Any]:
        """Return the report so far."""
        return self._control("GET", "/report")

    def rounds(self, at_least: int) -> Iterator[int]:
        """Count the rounds of a change: one, and others until this number of requests was sent."""
        number = 0
        while number == 0 or self.report()["requests"] < at_least:
            yield number
            number += 1

    def stop(self, *, at_least: int = 0, timeout_seconds: float = LONGEST_SECONDS) -> dict[str, Any]:
        """Wait until this number of requests was sent, stop sending, and return the report."""
        if at_least:
            wait(
                lambda: self.report()["requests"] >= at_least,
                timeout_seconds=timeout_seconds,
                explain=lambda: json.dumps(self.report(), indent=1),
                poll_seconds=2,
            )
        return self._control("POST", "/stop")

    def _copy(self) -> None:
        self._kube.execute(self._pod, "sh", "-c", f"cat > {DRIVER}", text=SOURCE.read_text())

    def _takes_marks(self) -> bool:
        try:
            self.report()
        except KubectlError:
            return False
        return True

    def _log(self, path: str) -> str:
        return self._kube.execute(self._pod, "cat", path)

    def _control(self, method: str, path: str) -> dict[str, Any]:
        words = ("curl", "-sS", "--fail", "-X", method, self._url + path)
        answer: dict[str, Any] = json.loads(self._kube.execute(self._pod, *words))
        return answer


def _answers(revision: str) -> str:
    return f"/tmp/{revision}.json"
