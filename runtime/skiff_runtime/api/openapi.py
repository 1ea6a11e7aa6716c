"""The API's description in OpenAPI 3.1, assembled by hand: no endpoint's body passes through a framework's parser."""

from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from skiff_runtime import __version__, contract
from skiff_runtime.api import reply_schemas as replies
from skiff_runtime.api.body import REQUEST_ID_HEADER, TIMEOUT_HEADER
from skiff_runtime.api.gate import KEYLESS_PATHS
from skiff_runtime.api.operations import JSON, ONE_OF, OPERATIONS, Operation

EVENTS: Final = "text/event-stream"
_SCHEMAS: Final = "#/components/schemas/"
_KEY: Final = "key"
_OWN_ID: Final = (
    "An id of the client's own, of up to 128 letters, digits and ._:/=+-; any other is replaced by a new one."
)
_ABOUT: Final = (
    "Generates text with one large language model, as OpenAI's API does. Errors have OpenAI's shape; "
    "every response carries the X-Request-Id that came with the request, or a new one."
)


_PROBE_REPLIES: Final[dict[str, type[BaseModel]]] = {
    contract.PATH_LIVEZ: replies.StatusReply,
    contract.PATH_READYZ: replies.StatusReply,
    contract.PATH_STARTUPZ: replies.StartReply,
}
"""What these tell with a 503, too."""

_REASONS: Final = {
    400: "The request is malformed, or asks for what cannot be done.",
    401: "A key is missing, or not known.",
    403: "A page of another origin may not ask for this where no keys are wanted.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait already; Retry-After tells when to come back.",
    500: "The service failed.",
    503: "The service starts, shuts down or restarts; Retry-After tells when to come back.",
    504: "The request's deadline passed, and its end was not confirmed in time.",
}


def description(*, keys: bool) -> dict[str, Any]:
    """The whole document; ``keys``: whether requests must carry one."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, keys=keys)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Skiff", "version": __version__, "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": _schemas()},
    }
    if keys:
        scheme = {"type": "http", "scheme": "bearer", "description": "One of the service's API keys."}
        document["components"]["securitySchemes"] = {_KEY: scheme}
    return document


def _schemas() -> dict[str, Any]:
    models = {
        model for each in OPERATIONS for model in (each.body, each.reply, each.events) if model is not None
    }
    models.add(replies.ErrorReply)
    ordered = sorted(models, key=lambda model: model.__name__)
    _, definitions = models_json_schema(
        [(model, "validation") for model in ordered], ref_template=_SCHEMAS + "{model}"
    )
    schemas: dict[str, Any] = definitions["$defs"]
    for model, names in ONE_OF.items():
        schemas[model.__name__]["oneOf"] = [_given(name) for name in names]
    return schemas


def _given(name: str) -> dict[str, Any]:
    """A schema of objects in which a field is there and not null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _operation(operation: Operation, *, keys: bool) -> dict[str, Any]:
    told: dict[str, Any] = {
        "operationId": f"{operation.method}{operation.path}".replace("/", "_")
        .replace("{", "")
        .replace("}", ""),
        "summary": operation.summary,
        "parameters": _parameters(operation),
        "responses": {"200": _success(operation)},
    }
    if operation.about:
        told["description"] = operation.about
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": {JSON: {"schema": _reference(operation.body)}}}
    errors = list(operation.errors)
    if keys and operation.path not in KEYLESS_PATHS:
        told["security"] = [{_KEY: []}]
        errors.append(401)
    elif not keys and operation.method == "post":
        errors.append(403)
    for status in sorted(errors):
        told["responses"][str(status)] = _failure(operation, status)
    return told


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    found = [_header(REQUEST_ID_HEADER, _OWN_ID, {"type": "string"})]
    if operation.events is not None:
        deadline = {"type": "number", "exclusiveMinimum": 0, "maximum": 86400}
        found.append(_header(TIMEOUT_HEADER, "End the request after so many seconds.", deadline))
        found.append(_header(b"traceparent", "W3C trace context.", {"type": "string"}))
    if "{model}" in operation.path:
        found.append({"name": "model", "in": "path", "required": True, "schema": {"type": "string"}})
    return found


def _header(name: bytes, about: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name.decode(), "in": "header", "required": False, "description": about, "schema": schema}


def _success(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.reply is not None:
        content[JSON] = {"schema": _reference(operation.reply)}
    if operation.events is not None:
        content[EVENTS] = {"schema": {"description": _stream_of(operation.events)}}
    if operation.plain:
        content[operation.plain] = {"schema": {"type": "object" if operation.plain == JSON else "string"}}
    return {"description": "Done.", "headers": _id_header(), "content": content}


def _stream_of(model: type[BaseModel]) -> str:
    return f"Lines 'data: JSON', where JSON is a {model.__name__}; 'data: [DONE]' is the last."


def _failure(operation: Operation, status: int) -> dict[str, Any]:
    schema = _reference(_PROBE_REPLIES.get(operation.path, replies.ErrorReply))
    headers = _id_header()
    if status in (429, 503) and operation.path not in _PROBE_REPLIES:
        headers["retry-after"] = {"description": "Seconds.", "schema": {"type": "string"}}
    return {"description": _REASONS[status], "headers": headers, "content": {JSON: {"schema": schema}}}


def _id_header() -> dict[str, Any]:
    return {REQUEST_ID_HEADER.decode(): {"description": "The request's id.", "schema": {"type": "string"}}}


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _SCHEMAS + model.__name__}
