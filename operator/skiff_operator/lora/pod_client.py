"""Requests to serving pods about their adapters: list, load and unload, with the admin key of the service.

Anything may answer at a pod's address: sizes and times are bounded, redirects are not followed, and no cookie is kept.
"""

from typing import Any, Final

import aiohttp
import msgspec

from skiff_operator.lora.plan import Fault
from skiff_operator.pod_metrics import pod_session, url_host
from skiff_operator.redact import redact
from skiff_operator.response_body import read_body
from skiff_operator.status import ADAPTER_REFUSED
from skiff_runtime import contract

_CONNECTIONS: Final = 64
_CONNECT_SECONDS: Final = 2.0
_LIST_SECONDS: Final = 5.0
_LOAD_SECONDS: Final = 900.0
"""A load may download the adapter."""
_UNLOAD_SECONDS: Final = 300.0
"""An unload may wait for requests."""
_MAX_LIST_BYTES: Final = 4 << 20
_MAX_ERROR_BYTES: Final = 64 << 10
_UNAUTHORIZED: Final = (401, 403)
_NOT_FOUND: Final = 404
_BUSY: Final = (408, 425, 429)


class _Card(msgspec.Struct):
    """One model of a list; an adapter has a parent."""

    id: str
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Error(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _Error


class PodClient:
    """Pools of connections to pods: one for lists, which no slow load may delay, and one for loads and unloads."""

    def __init__(self) -> None:
        """Open nothing yet: the sessions belong to the running event loop."""
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def list(self, address: str, key: str) -> dict[str, str] | Fault:
        """Return the adapters of the pod at this IP address, names with their roots, or why it does not answer."""
        answer = await self._send("GET", address, contract.PATH_MODELS, key, None, _LIST_SECONDS)
        if isinstance(answer, Fault):
            return answer
        status, body = answer
        if status != 200:
            return _fault(status, body)
        try:
            cards = msgspec.json.decode(body, type=_Cards).data
        except msgspec.DecodeError as error:
            return Fault("PodUnreachable", f"its list of models cannot be read: {error}")
        return {each.id: each.root or "" for each in cards if each.parent}

    async def load(self, address: str, key: str, name: str, path: str, *, replace: bool) -> Fault | None:
        """Have a pod load an adapter; `replace`: in the place of another one of the name."""
        body: dict[str, Any] = {"lora_name": name, "lora_path": path}
        if replace:
            body["load_inplace"] = True
        answer = await self._send("POST", address, contract.PATH_LOAD_ADAPTER, key, body, _LOAD_SECONDS)
        if isinstance(answer, Fault):
            return answer
        if answer[0] == _NOT_FOUND and not _message(answer[1]):
            return Fault(
                "LoRAUnsupported",
                "its image serves no LoRA adapters; use a newer spec.runtime.image",
                permanent=True,
            )
        return None if answer[0] < 300 else _fault(*answer)

    async def unload(self, address: str, key: str, name: str) -> Fault | None:
        """Have a pod unload an adapter; it is no error if it does not have it."""
        body = {"lora_name": name}
        answer = await self._send("POST", address, contract.PATH_UNLOAD_ADAPTER, key, body, _UNLOAD_SECONDS)
        if isinstance(answer, Fault):
            return answer
        return None if answer[0] < 300 or answer[0] == _NOT_FOUND else _fault(*answer)

    async def close(self) -> None:
        """Close the connections."""
        for session in self._sessions.values():
            await session.close()

    async def _send(
        self, method: str, address: str, path: str, key: str, body: dict[str, Any] | None, seconds: float
    ) -> tuple[int, bytes] | Fault:
        """Return status and body of a response."""
        host = url_host(address)
        if not host:
            return Fault("PodUnreachable", f"{address!r} is no IP address")
        headers = {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        url = f"http://{host}:{contract.API_PORT}{path}"
        limit = _MAX_LIST_BYTES if body is None else _MAX_ERROR_BYTES
        try:
            async with self._pool(method).request(
                method, url, json=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await read_body(response, limit)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return Fault("PodUnreachable", f"{method} {path}: {str(error) or type(error).__name__}")

    def _pool(self, method: str) -> aiohttp.ClientSession:
        session = self._sessions.get(method)
        if session is None:
            session = pod_session(_CONNECTIONS, aiohttp.ClientTimeout(sock_connect=_CONNECT_SECONDS))
            self._sessions[method] = session
        return session


def _fault(status: int, body: bytes) -> Fault:
    """Return the meaning of an unsuccessful response."""
    text = redact(_message(body)) or f"status {status}"
    if status in _UNAUTHORIZED:
        return Fault(
            "Unauthorized",
            f"it does not accept the operator's admin key ({text}); `skiff rollout restart` gives its pods the present one",
        )
    refused = 400 <= status < 500 and status not in _BUSY
    return Fault(ADAPTER_REFUSED if refused else "LoadFailed", text, permanent=refused)


def _message(body: bytes) -> str:
    """Return the message of an error in the shape of OpenAI's API; empty for another body."""
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message
    except msgspec.DecodeError:
        return ""
