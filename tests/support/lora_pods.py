"""Serving pods at addresses of the loopback network that keep the runtime's contract about LoRA adapters, and no more."""

import hashlib
import http.server
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from apiserver import ApiServer
from operator_checks import place
from operator_process import eventually
from play_kubelet import PlayKubelet

from skiff_runtime.contract import API_PORT

BASE = "llama"


class LoRAPod:
    """One server: `adapters` are names with their roots; what a load names in `refused` gets a 400 with that message.

    `key_digest`: of the admin key that it accepts. `calls` are the loads and unloads, in order. A load of `slow` waits.
    """

    def __init__(self, key_digest: str, adapters: Mapping[str, str], refused: Mapping[str, str]) -> None:
        self.key_digest, self.refused = key_digest, refused
        self.adapters = dict(adapters)
        self.calls: list[tuple[str, str]] = []
        self.failing = False
        self.slow = threading.Event()
        self.slow.set()

    def models(self) -> dict[str, Any]:
        """Return the list of models."""
        cards = [{"id": BASE, "object": "model", "root": "demo://", "parent": None}]
        cards += [
            {"id": name, "object": "model", "root": root, "parent": BASE}
            for name, root in list(self.adapters.items())
        ]
        return {"object": "list", "data": cards}

    def load(self, body: dict[str, Any]) -> tuple[int, str]:
        """Load an adapter; return status and message."""
        name, path = body["lora_name"], body["lora_path"]
        self.calls.append(("load", name))
        if self.failing:
            return 500, "the hub does not answer"
        self.slow.wait(30)
        if path in self.refused:
            return 400, self.refused[path]
        if name in self.adapters and not body.get("load_inplace"):
            return 400, f"the adapter {name!r} is loaded already"
        self.adapters[name] = path
        return 200, ""

    def unload(self, body: dict[str, Any]) -> tuple[int, str]:
        """Unload an adapter; return status and message."""
        self.calls.append(("unload", body["lora_name"]))
        found = self.adapters.pop(body["lora_name"], None)
        return (200, "") if found is not None else (404, "no such adapter")

    def accepts(self, authorization: str) -> bool:
        """Return whether a header has the admin key."""
        key = authorization.removeprefix("Bearer ")
        return hashlib.sha256(key.encode()).hexdigest() == self.key_digest


@contextmanager
def served(address: str, pod: LoRAPod) -> Iterator[None]:
    """Serve a pod at an address of the loopback network, at the port of serving pods."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/v1/models" and pod.accepts(self.headers.get("Authorization", "")):
                self._answer(200, pod.models())
            else:
                self._answer(401 if self.path == "/v1/models" else 404, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not pod.accepts(self.headers.get("Authorization", "")):
                self._answer(403, {"error": {"message": "an admin key is required"}})
                return
            actions = {"/v1/load_lora_adapter": pod.load, "/v1/unload_lora_adapter": pod.unload}
            status, message = actions[self.path](body)
            self._answer(status, {"error": {"message": message}} if message else {})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, API_PORT), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


class LoRAPods:
    """Plays the kubelet of an InferenceService whose pods are `LoRAPod`s, each at an address of its own.

    A container starts as the kubelet starts it: with the digest and the adapters that the ConfigMap has then.
    """

    def __init__(self, api: ApiServer, subnet: int, stack: ExitStack, name: str = BASE) -> None:
        self._api, self._subnet, self._stack, self._name = api, subnet, stack, name
        self.kubelet = PlayKubelet(api, name)
        self.refused: dict[str, str] = {}
        self.servers: dict[str, LoRAPod] = {}

    def config(self) -> dict[str, str]:
        """Return the data of the ConfigMap, once it exists."""
        found = eventually(lambda: self._api.find("configmaps", f"{self._name}.lora"), "the ConfigMap")
        data: dict[str, str] = found["data"]
        return data

    def start(self, *, with_adapters: bool = True) -> LoRAPod:
        """Make the server of a container that starts now."""
        data = self.config()
        text = data.get("adapters", "") if with_adapters else ""
        pairs = [each.split("=", 1) for each in text.split(",") if each]
        return LoRAPod(data["adminKeySha256"], dict(pairs), self.refused)

    def serve(self, count: int) -> list[LoRAPod]:
        """Wait for exactly `count` pods, make all of them ready, and return their servers."""
        eventually(lambda: len(self.kubelet.pods()) == count, f"{count} pods")
        found = []
        for pod in self.kubelet.pods():
            name = pod["metadata"]["name"]
            if name not in self.servers:
                server = self.servers[name] = self.start()
                address = f"127.2.{self._subnet}.{len(self.servers) + 1}"
                self._stack.enter_context(served(address, server))
                self.kubelet.report(pod, ready=True, state={"running": {"startedAt": "2026-01-01T00:00:00Z"}})
                place(self._api, name, address)
            found.append(self.servers[name])
        return found

    def restart(self, name: str, restarts: int) -> None:
        """Let the container of a pod end and start again."""
        fresh = self.start()
        self.servers[name].adapters = fresh.adapters
        (pod,) = [each for each in self.kubelet.pods() if each["metadata"]["name"] == name]
        running = {"running": {"startedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}}
        self.kubelet.report(pod, ready=True, state=running, restarts=restarts)
        place(self._api, name, pod["status"]["podIP"])
