"""The chat API of a server, seen from a person's side."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import httpx

from skiff_runtime.contract import PATH_CHAT_COMPLETIONS, PATH_MODELS
from skiff_runtime.errors import SkiffError
from skiff_runtime.sse import DONE, EventDecoder

MAX_ERROR_BYTES: Final = 1 << 20
_TIMEOUT: Final = httpx.Timeout(connect=5.0, read=600.0, write=30.0, pool=5.0)
Message = dict[str, str]


class ChatError(SkiffError):
    """The server could not be reached or refused; the message is one line for the user."""


class ServerUnreachable(ChatError):
    """Nothing answers at the address."""


class Piece(NamedTuple):
    """A part of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class ChatClient:
    """One server. ``output_tokens``: how many the latest answer had, by the server's count; 0 before its end."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None) -> None:
        """Connects, and asks for the served model's name if none is given; ChatError if that fails."""
        self.url = url.rstrip("/")
        self.output_tokens = 0
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=False, headers=headers)
        served = self._models()
        if model is not None and model not in served:
            raise ChatError(f"{self.url} serves {', '.join(served)}, not {model}; correct --model")
        self.model = model or served[0]

    def stream(
        self, messages: Sequence[Message], parameters: Mapping[str, Any]
    ) -> Generator[Piece, None, None]:
        """The answer as it comes; closing the iterator ends the request. ChatError at any point."""
        self.output_tokens = 0
        body = {"model": self.model, "messages": list(messages), "stream": True, **parameters}
        body["stream_options"] = {"include_usage": True}
        try:
            with self._http.stream("POST", self.url + PATH_CHAT_COMPLETIONS, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise ChatError(_message(_read(response), response.status_code))
                yield from self._pieces(response.iter_raw())
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"lost the connection to {self.url} ({_reason(error)})") from error

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _models(self) -> list[str]:
        try:
            with self._http.stream("GET", self.url + PATH_MODELS) as response:
                body, status = _read(response), response.status_code
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerUnreachable(
                f"nothing answers at {self.url} ({_reason(error)}); start a server with `skiff serve`"
            ) from error
        if status != httpx.codes.OK:
            raise ChatError(f"{self.url}: {_message(body, status)}")
        try:
            names = [str(each["id"]) for each in json.loads(body)["data"]]
        except (ValueError, TypeError, KeyError):
            names = []
        if not names:
            raise ChatError(f"{self.url} answers, but not as an OpenAI-compatible server does; correct --url")
        return names

    def _pieces(self, raw: Iterator[bytes]) -> Iterator[Piece]:
        decoder = EventDecoder()
        for part in raw:
            for data in decoder.feed(part):
                if data == DONE:
                    return
                yield from self._told(data)
        raise ChatError("the server ended the answer midway; it may be restarting")

    def _told(self, data: bytes) -> list[Piece]:
        """What an event adds to the answer; one that tells the usage adds nothing."""
        try:
            event = json.loads(data)
            if "error" in event:
                raise ChatError(str(event["error"]["message"]))
            if usage := event.get("usage"):
                self.output_tokens = int(usage["completion_tokens"])
            delta = event["choices"][0]["delta"] if event["choices"] else {}
            pieces = [Piece(delta.get("reasoning_content") or "", True), Piece(delta.get("content") or "")]
            return [piece for piece in pieces if piece.text]
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ChatError(f"the server sent an event that is none of the chat API ({error!r})") from error


def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > MAX_ERROR_BYTES:
            break
    return bytes(body)


def _message(body: bytes, status: int) -> str:
    """What an error body says, in one line."""
    try:
        return " ".join(str(json.loads(body)["error"]["message"]).split())
    except (ValueError, TypeError, KeyError):
        return f"the server answered {status}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
