"""The model's name and the prompt in a request. The router reads nothing else of a body; the pod validates it.

The body of the native endpoint has no model, for its pod serves one; there a header names it.
"""

from typing import Final

import msgspec

from skiff_runtime import contract
from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.request_headers import get_header
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.prompt_blocks import PromptFields

MODEL_HEADER: Final = b"x-skiff-model"


class RoutedBody(PromptFields):
    """The fields that choose a pod, and ``stream``; all but the model as JSON text, which the pod validates."""

    model: str = ""
    stream: msgspec.Raw = msgspec.Raw(b"")
    user: msgspec.Raw = msgspec.Raw(b"")
    prompt_cache_key: msgspec.Raw = msgspec.Raw(b"")

    @property
    def wants_stream(self) -> bool:
        """Return whether the client expects a stream of events."""
        return bytes(self.stream) == b"true"


_DECODER = msgspec.json.Decoder(RoutedBody)
_RAW_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_header_model(headers: Headers) -> str:
    """Return the model that a request of the native endpoint names by its header.

    Raises:
        InvalidRequest: It is missing, or not UTF-8.
    """
    try:
        model = get_header(headers, MODEL_HEADER).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("the header X-Skiff-Model is not UTF-8", param="x-skiff-model") from None
    if not model:
        raise InvalidRequest(
            f"the header X-Skiff-Model is missing: on {contract.PATH_GENERATE} it names the model; "
            f"GET {contract.PATH_MODELS} lists the models",
            param="x-skiff-model",
        )
    return model


def read_body(body: bytes, *, model: str = "") -> RoutedBody:
    """Return the fields of a body. ``model``: the one that a header names, in the place of the body's.

    Raises:
        InvalidRequest: The body is not a JSON object, or its model is not a string or missing.
    """
    try:
        fields = _DECODER.decode(body)
    except msgspec.DecodeError as error:  # ValidationError is one, too
        raise InvalidRequest(f"the request body cannot be read: {error}", param="model") from None
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply", param="model") from None
    if model:
        fields.model = model
    elif not fields.model:
        raise InvalidRequest("'model' is missing; GET /v1/models lists the models", param="model")
    return fields


def replace_model(body: bytes, model: str) -> bytes:
    """Return a body, which ``read_body`` has read, with another ``model`` and all other values as they are."""
    fields = _RAW_DECODER.decode(body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)
