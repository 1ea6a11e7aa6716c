"""`skiff top`: sums and rates of the pods' metrics, and what it shows where a pod does not answer."""

import argparse
import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from skiff_operator.cli import cluster, main, top
from skiff_operator.cli.top import Pod, Sample, render
from skiff_operator.errors import ApiRefused, ApiUnavailable, OperatorError

T = TypeVar("T")
PAGE = """\
# HELP skiff_requests_running Requests that run.
# TYPE skiff_requests_running gauge
skiff_requests_running {running}
skiff_requests_queued 1.0
skiff_requests_queued_seconds 9.0
skiff_kv_cache_usage_ratio 0.25
skiff_finished_requests_total{{finish_reason="stop"}} {finished}
skiff_finished_requests_total{{finish_reason="length"}} 5.0
skiff_prompt_tokens_total {prompt}
skiff_generation_tokens_total 1e+06
skiff_prefix_cache_queries_total {prompt}
skiff_prefix_cache_hits_total {hits}
"""


def page(*, running: float = 3.0, finished: float = 10.0, prompt: float = 1000.0, hits: float = 0.0) -> str:
    """The metrics of a pod; 1,000 tokens of its prompts were looked up in the prefix cache."""
    return PAGE.format(running=running, finished=finished, prompt=prompt, hits=hits)


def table(text: str) -> list[list[str]]:
    """The cells of a rendered table."""
    return [line.split() for line in text.splitlines()]


BEFORE = Sample.parse(page(), 10.0)
AFTER = Sample.parse(page(finished=14.0, prompt=5000.0, hits=1000.0), 12.0)
BUSY = Pod("llama-1", "llama", True, BEFORE, AFTER)


def test_rates_are_of_the_interval_and_gauges_of_now() -> None:
    [head, row] = table(render(["llama"], [BUSY], by_pod=False))
    assert head[:4] == ["NAME", "READY", "RUNNING", "QUEUED"]
    assert row == ["llama", "1/1", "3", "1", "2.0", "2,000", "0.0", "25%", "25%"]


def test_a_service_is_the_sum_of_its_pods() -> None:
    other = Pod("llama-2", "llama", False, BEFORE, AFTER)
    strange = Pod("qwen-1", "qwen", True, BEFORE, AFTER)
    _, row, alone, none = table(render(["llama", "qwen", "zero"], [BUSY, other, strange], by_pod=False))
    assert row == ["llama", "1/2", "6", "2", "4.0", "4,000", "0.0", "25%", "25%"]
    assert alone[:3] == ["qwen", "1/1", "3"]
    assert none == ["zero", "0/0", "-", "-", "-", "-", "-", "-", "-"]


LORA = """\
skiff_lora_adapters {adapters}
skiff_lora_slots{{state="used"}} 2.0
skiff_lora_slots{{state="idle"}} 1.0
skiff_lora_slots{{state="empty"}} 5.0
"""


def test_services_with_lora_show_their_adapters_and_slots() -> None:
    pods = [
        Pod(
            f"llama-{number}",
            "llama",
            True,
            BEFORE,
            Sample.parse(page() + LORA.format(adapters=number), 12.0),
        )
        for number in (3, 4)
    ]
    without = Pod(
        "qwen-1", "qwen", True, BEFORE, Sample.parse(page() + 'skiff_lora_slots{state="empty"} 0.0\n', 12.0)
    )
    screen = render(["llama", "qwen"], [*pods, without], by_pod=False)
    head, llama, qwen = screen.splitlines()
    assert head.endswith("ADAPTERS   LORA SLOTS")
    assert llama.split()[-2:] == ["4", "6/16"] and qwen.split()[-2:] == ["-", "-"]
    assert "ADAPTERS" not in render(["qwen"], [without], by_pod=False)


def test_a_counter_that_began_anew_has_no_rate() -> None:
    restarted = Pod("llama-1", "llama", True, AFTER, Sample.parse(page(), 14.0))
    _, row = table(render([], [restarted], by_pod=True))
    assert row == ["llama-1", "1/1", "3", "1", "-", "-", "0.0", "25%", "-"]


class Api:
    """The API server's answers to `top`: pods of one service, and a page or an error for each."""

    namespace = "default"

    def __init__(self, answers: dict[str, list[str | Exception]]) -> None:
        self.client = self
        self.paths: list[str] = []
        self._answers = answers

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine."""
        return asyncio.run(work)

    def service(self, name: str) -> dict[str, Any]:
        """Return the InferenceService."""
        return {"metadata": {"name": name}}

    def list(self, kind: Any, *, selector: str = "") -> list[dict[str, Any]]:
        """Return the pods, or the only InferenceService."""
        return [_pod(name) for name in self._answers] if kind.name == "Pod" else [self.service("llama")]

    async def send(self, method: str, path: str) -> bytes:
        """Return the next answer of a pod."""
        self.paths.append(path)
        answer = self._answers[path.split("/")[6].partition(":")[0]].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer.encode()


def _pod(name: str) -> dict[str, Any]:
    labels = {"serving.skiff.dev/inferenceservice": "llama", "pod-template-hash": "h"}
    owner = {"kind": "ReplicaSet", "name": "llama-h" if name != "strange" else "else", "controller": True}
    state: dict[str, Any] = {} if name == "starting" else {"running": {}}
    return {
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"state": state}],
        },
    }


def shown(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str]:
    """Exit code and output of the command."""

    @contextmanager
    def connected(_: argparse.Namespace) -> Iterator[Api]:
        yield api

    monkeypatch.setattr(cluster, "connected", connected)
    monkeypatch.setattr(top.time, "sleep", lambda _: None)  # type: ignore[attr-defined]
    code = main.main(["top", *words])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_one_screen_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    down = ApiUnavailable("dial tcp: connection refused")
    api = Api({"b": [page(), page()], "a": [page(), down], "starting": [], "strange": []})
    code, screen = shown(api, monkeypatch, capsys, "llama")
    assert code == 0 and "\x1b" not in screen
    rows = table(screen)
    assert [row[0] for row in rows[:4]] == ["POD", "a", "b", "starting"]
    assert rows[1][2] == rows[3][2] == "-" and rows[2][2] == "3"
    assert screen.splitlines()[-1] == "pod a: dial tcp: connection refused"
    assert api.paths[0] == "/api/v1/namespaces/default/pods/a:8000/proxy/metrics"


def test_the_missing_right_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    denied = ApiRefused('pods "a" is forbidden', status=403)
    code, text = shown(Api({"a": [denied]}), monkeypatch, capsys)
    assert code == 1 and "pods/proxy" in text and "role edit" in text


def test_an_interval_out_of_range_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--interval", "0"]) == 1
    assert "0.5 to 60 seconds" in capsys.readouterr().err


def test_too_many_pods_are_not_read() -> None:
    api = Api({str(index): [] for index in range(top.MAX_PODS + 1)})
    with pytest.raises(OperatorError, match="give the name of one service"):
        top.observe(api, None, {})  # type: ignore[arg-type]
