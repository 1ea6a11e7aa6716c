"""A well-behaved client that sends one request after another on one connection, and checks each response."""

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Final

import httpx

PAUSE_SECONDS: Final = 0.02
TIMEOUT_SECONDS: Final = 30.0
MAX_EXAMPLES: Final = 5
PROMPT: Final = "What is a pod?"


@dataclass
class BackgroundClient:
    """Runs in a thread during a with-block. Each response must be a completion that echoes the request's own number."""

    url: str
    model: str
    right: int = 0
    wrong: int = 0
    slowest_seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "BackgroundClient":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        with httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS) as http:
            while not self._stopping.wait(PAUSE_SECONDS):
                number += 1
                began = time.monotonic()
                try:
                    problem = self._ask(http, number)
                except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                    problem = repr(error)
                self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - began)
                if problem is None:
                    self.right += 1
                    continue
                self.wrong += 1
                if len(self.examples) < MAX_EXAMPLES:
                    self.examples.append(f"request {number}: {problem}")

    def _ask(self, http: httpx.Client, number: int) -> str | None:
        """Request one completion, every other one streamed. Returns what is wrong with it, or None."""
        prompt, request_id, stream = f"{PROMPT} {number}", f"beside-{number}", number % 2 == 0
        body = {"model": self.model, "prompt": prompt, "echo": True, "max_tokens": 2, "stream": stream}
        reply = http.post("/v1/completions", json=body, headers={"x-request-id": request_id})
        if (reply.status_code, reply.headers.get("x-request-id")) != (200, request_id):
            return f"{reply.status_code} {reply.headers} {reply.text[:300]}"
        if not stream:
            text: str = reply.json()["choices"][0]["text"]
        else:
            *events, last = reply.text.removesuffix("\n\n").split("\n\n")
            if last != "data: [DONE]":
                return f"a stream without end: {reply.text[-300:]}"
            choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
            text = "".join(choice["text"] for choice in choices)
        return None if text.startswith(prompt) and len(text) > len(prompt) else f"the text {text!r}"
