"""HTTP client of a server's chat API, for ``skiff chat``."""

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx

from skiff_runtime.contract import PATH_CHAT_COMPLETIONS, PATH_MODELS
from skiff_runtime.errors import SkiffError
from skiff_runtime.sse import DONE, EventDecoder

MAX_ERROR_BYTES: Final = 1 << 20
_TIMEOUT: Final = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=5.0)
Message = dict[str, str]


class ChatError(SkiffError):
    """The server could not be reached, or it refused the request. The message is one line for the user."""


class ServerUnreachable(ChatError):
    """No server answers at the address."""


class AnswerDelta(NamedTuple):
    """The next part of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class ChatClient:
    """Client of one server.

    ``output_tokens`` is the number of tokens of the latest answer, as the server counts them; 0 before the answer ends.
    ``on_progress`` is called with the words in which a router reports the start of a pod, while the answer waits for it.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None) -> None:
        """Connect, and use the first served model unless ``model`` names one. Raises ``ChatError``."""
        self.url = url.rstrip("/")
        self.output_tokens = 0
        self.on_progress: Callable[[str], None] = _ignore
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=False, headers=headers)
        served = self._fetch_model_names()
        if model is not None and model not in served:
            raise ChatError(f"{self.url} serves {', '.join(served)}, not {model}; correct --model")
        self.model = model or served[0]

    def stream(
        self, messages: Sequence[Message], parameters: Mapping[str, Any]
    ) -> Generator[AnswerDelta, None, None]:
        """Yield the answer as it comes; closing the iterator ends the request. Raises ``ChatError`` at any point."""
        self.output_tokens = 0
        body = {"model": self.model, "messages": list(messages), "stream": True, **parameters}
        body["stream_options"] = {"include_usage": True}
        try:
            with self._http.stream("POST", self.url + PATH_CHAT_COMPLETIONS, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise ChatError(_error_message(_read(response), response.status_code))
                yield from self._read_answer(response.iter_raw())
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"lost the connection to {self.url} ({_reason(error)})") from error

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _fetch_model_names(self) -> list[str]:
        try:
            with self._http.stream("GET", self.url + PATH_MODELS) as response:
                body, status = _read(response), response.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnreachable(
                f"nothing answers at {self.url} ({_reason(error)}); start a server with `skiff serve`"
            ) from error
        if status != httpx.codes.OK:
            raise ChatError(f"{self.url}: {_error_message(body, status)}")
        try:
            names = [str(each["id"]) for each in json.loads(body)["data"]]
        except (ValueError, TypeError, KeyError):
            names = []
        if not names:
            raise ChatError(f"{self.url} answers, but not like an OpenAI-compatible server; correct --url")
        return names

    def _read_answer(self, raw: Iterator[bytes]) -> Iterator[AnswerDelta]:
        decoder = EventDecoder(lambda text: self.on_progress(text.decode(errors="replace")))
        for part in raw:
            for data in decoder.feed(part):
                if data == DONE:
                    return
                yield from self._parse_event(data)
        raise ChatError("the server ended the answer midway; it may be restarting")

    def _parse_event(self, data: bytes) -> list[AnswerDelta]:
        """Return the parts of the answer in an event; an event with the usage has none."""
        try:
            event = json.loads(data)
            if "error" in event:
                raise ChatError(str(event["error"]["message"]))
            if usage := event.get("usage"):
                self.output_tokens = int(usage["completion_tokens"])
            delta = event["choices"][0]["delta"] if event["choices"] else {}
            deltas = [
                AnswerDelta(delta.get("reasoning_content") or "", is_reasoning=True),
                AnswerDelta(delta.get("content") or ""),
            ]
            return [each for each in deltas if each.text]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ChatError(
                f"the server sent an event that does not belong to the chat API ({error!r})"
            ) from error


def _ignore(text: str) -> None:
    """Show no progress."""


def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    for part in response.iter_raw():
        body += part
        if len(body) > MAX_ERROR_BYTES:
            break
    return bytes(body)


def _error_message(body: bytes, status: int) -> str:
    """Return the message of an error body as one line."""
    try:
        return " ".join(str(json.loads(body)["error"]["message"]).split())
    except (ValueError, TypeError, KeyError):
        return f"the server answered {status}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
