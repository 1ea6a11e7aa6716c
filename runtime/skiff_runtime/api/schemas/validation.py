"""Validation of request bodies: from raw bytes to a model, or to one sentence about what to change."""

from difflib import get_close_matches
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from skiff_runtime.api.schemas.field_support import STRICT, UNSUPPORTED, Support, support_of
from skiff_runtime.api.schemas.request_bodies import StrictModel
from skiff_runtime.errors import InvalidRequest

_MAX_SHOWN_CHARACTERS: Final = 60
_MAX_ERRORS: Final = 100
_UNION_BRANCHES: Final = frozenset({"str", "int", "float", "bool", "none"})

Body = TypeVar("Body", bound=StrictModel)


def parse_body(model: type[Body], raw: bytes, *, strict: bool = False) -> Body:
    """Return the body in ``raw``; with ``strict``, hints are refused. Raises ``InvalidRequest`` about its first error."""
    try:
        return model.model_validate_json(raw, context=STRICT if strict else None)
    except ValidationError as error:
        raise _describe(_select_error(error), model) from None


def validate_fields(model: type[Body], fields: dict[str, Any]) -> Body:
    """Return the body with these fields, which were validated one by one. Raises ``InvalidRequest`` about combinations."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _describe(_select_error(error), model) from None


def _select_error(error: ValidationError) -> ErrorDetails:
    """Return the first error; for a field of several types, that of the type which matched the value most deeply."""
    if error.error_count() > _MAX_ERRORS:
        raise InvalidRequest(f"the request body has {error.error_count()} errors; is it meant for this API?")
    errors = error.errors(include_url=False, include_context=False)
    same_field = [each for each in errors if each["loc"][:1] == errors[0]["loc"][:1]]
    return max(same_field, key=lambda each: len(each["loc"]))


def _describe(error: ErrorDetails, model: type[StrictModel]) -> InvalidRequest:
    if error["type"] == "json_invalid":
        return InvalidRequest(
            f"the request body is not valid JSON: {error['msg'].removeprefix('Invalid JSON: ')}"
        )
    path = _simplify_path(error["loc"])
    if not path:
        no_object = error["type"] == "model_type"
        return InvalidRequest("the request body must be a JSON object" if no_object else error["msg"])
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    names = [part for part in path if isinstance(part, str)]
    last = names[-1]
    if error["type"] == "missing":
        return InvalidRequest(f"'{param}' is missing", param=param)
    if error["type"] == UNSUPPORTED:
        return InvalidRequest(f"'{param}' is {error['msg']}", param=param, code="unsupported_parameter")
    if error["type"] == "extra_forbidden":
        fields = model.model_fields.items()
        served = [field.alias or name for name, field in fields if support_of(field) is Support.SERVED]
        similar = get_close_matches(last, sorted(served), n=1)
        hint = f", or did you mean '{similar[0]}'?" if similar and len(path) == 1 else ""
        return InvalidRequest(
            f"unknown field '{param}'; remove it{hint}", param=param, code="unknown_parameter"
        )
    if path[-1] in model.expected_types and error["type"].endswith("_type"):
        return InvalidRequest(f"'{param}' {model.expected_types[last]}", param=param)
    return InvalidRequest(f"'{param}': {error['msg']}{_format_value(error)}", param=param)


def _simplify_path(location: tuple[int | str, ...]) -> list[int | str]:
    """Remove the parts that pydantic adds for the branches of a union, such as ``list[constrained-int]``."""
    first, *others = location or ("",)
    kept = [part for part in others if isinstance(part, int) or not (part in _UNION_BRANCHES or "[" in part)]
    path = [first, *kept] if first else []
    return [part if isinstance(part, int) else part[:_MAX_SHOWN_CHARACTERS] for part in path]


def _format_value(error: ErrorDetails) -> str:
    """Return the invalid value for the end of a message; "" if it is long, structured or of the wrong type."""
    value: Any = error["input"]
    if not isinstance(value, str | int | float | bool) or error["type"].endswith("_type"):
        return ""
    text = repr(value)
    return f", not {text}" if len(text) <= _MAX_SHOWN_CHARACTERS else ""
