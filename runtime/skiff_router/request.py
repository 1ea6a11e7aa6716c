"""The model's name and the prompt in the body of a request. The router reads nothing else; the pod validates it."""

import msgspec

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.prompt_blocks import PromptFields


class RoutedBody(PromptFields):
    """The fields that choose a pod; those of the prompt as JSON text."""

    model: str = ""


_DECODER = msgspec.json.Decoder(RoutedBody)
_RAW_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_body(body: bytes) -> RoutedBody:
    """Return the fields of a body, with a ``model``.

    Raises:
        InvalidRequest: The body is not a JSON object, or its model is not a string or missing.
    """
    try:
        fields = _DECODER.decode(body)
    except msgspec.DecodeError as error:  # ValidationError is one, too
        raise InvalidRequest(f"the request body cannot be read: {error}", param="model") from None
    except RecursionError:
        raise InvalidRequest("the request body is nested too deeply", param="model") from None
    if not fields.model:
        raise InvalidRequest("'model' is missing; GET /v1/models lists the models", param="model")
    return fields


def replace_model(body: bytes, model: str) -> bytes:
    """Return a body, which ``read_body`` has read, with another ``model`` and all other values as they are."""
    fields = _RAW_DECODER.decode(body)
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)
