"""A real Prometheus on loopback, and local ports into pods for it to scrape."""

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml
from free_port import free_port
from kube import Kube, tool, wait

SCRAPE_SECONDS: Final = 1
_FORWARDING: Final = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


class Prometheus:
    """One running server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an API call; AssertionError when Prometheus refuses it."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as response:
            body = json.load(response)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        samples: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return samples


@contextlib.contextmanager
def port_forward(kube: Kube, target: str, port: int) -> Iterator[int]:
    """A local port that leads to ``port`` of a pod."""
    command = kube.command("port-forward", "--address", "127.0.0.1", target, f":{port}")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        match = _FORWARDING.search(process.stdout.readline())
        assert match, f"kubectl port-forward {target} did not start"
        yield int(match[1])
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def running(folder: Path, jobs: dict[str, tuple[int, dict[str, str]]], rules: Path) -> Iterator[Prometheus]:
    """Prometheus that scrapes local ports: job name -> (port, labels of its target)."""
    settings = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": name,
                "static_configs": [{"targets": [f"127.0.0.1:{port}"], "labels": labels}],
            }
            for name, (port, labels) in jobs.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    port = free_port()
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([tool("prometheus-path"), *words], stdout=log, stderr=log)
    server = Prometheus(f"http://127.0.0.1:{port}")
    try:
        wait(lambda: _up(server), timeout_seconds=30, explain=lambda: (folder / "log").read_text())
        yield server
    finally:
        process.terminate()
        process.wait(timeout=20)


def _up(server: Prometheus) -> bool:
    try:
        return bool(server.query("1"))
    except OSError:
        return False
