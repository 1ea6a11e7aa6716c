"""Raw bytes to a validated request body, once; pydantic's errors to one sentence that says what to change."""

from difflib import get_close_matches
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from skiff_runtime.api.refusals import EXPECTED_TYPES, UNSUPPORTED_FIELDS
from skiff_runtime.api.schemas.request_bodies import StrictModel
from skiff_runtime.errors import InvalidRequest

_MAX_SHOWN_CHARACTERS: Final = 60
_MAX_FAULTS: Final = 100
_BRANCHES: Final = frozenset({"str", "int", "float", "bool", "none"})

Body = TypeVar("Body", bound=StrictModel)


def parse_body(kind: type[Body], raw: bytes) -> Body:
    """The body in ``raw``. Raises ``InvalidRequest`` about its first fault."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _refusal(_telling(error), kind) from None


def _telling(error: ValidationError) -> ErrorDetails:
    """The first fault, told by the branch of a union that went deepest."""
    if error.error_count() > _MAX_FAULTS:
        raise InvalidRequest(f"the request body has {error.error_count()} faults; is it meant for this API?")
    faults = error.errors(include_url=False, include_context=False)
    same = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    return max(same, key=lambda fault: len(fault["loc"]))


def _refusal(error: ErrorDetails, kind: type[StrictModel]) -> InvalidRequest:
    if error["type"] == "json_invalid":
        return InvalidRequest(
            f"the request body is no valid JSON: {error['msg'].removeprefix('Invalid JSON: ')}"
        )
    path = _path(error["loc"])
    if not path:
        whole = "the request body must be a JSON object"
        return InvalidRequest(whole if error["type"] == "model_type" else error["msg"])
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    names = [part for part in path if isinstance(part, str)]
    first, last = names[0], names[-1]
    if error["type"] == "missing":
        return InvalidRequest(f"'{where}' is missing", param=where)
    for name in (first, last):
        if name in UNSUPPORTED_FIELDS:
            return InvalidRequest(
                f"'{where}' is not supported yet: {UNSUPPORTED_FIELDS[name]}",
                param=where,
                code="unsupported_parameter",
            )
    if error["type"] == "extra_forbidden":
        meant = get_close_matches(last, sorted(set(kind.model_fields) - set(UNSUPPORTED_FIELDS)), n=1)
        hint = f", or did you mean '{meant[0]}'?" if meant and len(path) == 1 else ""
        return InvalidRequest(
            f"unknown field '{where}'; remove it{hint}", param=where, code="unknown_parameter"
        )
    if path[-1] in EXPECTED_TYPES and error["type"].endswith("_type"):
        return InvalidRequest(f"'{where}' {EXPECTED_TYPES[last]}", param=where)
    return InvalidRequest(f"'{where}': {error['msg']}{_shown(error)}", param=where)


def _path(location: tuple[int | str, ...]) -> list[int | str]:
    """``location`` without what pydantic adds for the branches of a union, such as ``list[constrained-int]``."""
    first, *others = location or ("",)
    kept = [part for part in others if isinstance(part, int) or not (part in _BRANCHES or "[" in part)]
    path = [first, *kept] if first else []
    return [part if isinstance(part, int) else part[:_MAX_SHOWN_CHARACTERS] for part in path]


def _shown(error: ErrorDetails) -> str:
    """The offending value, where it is short enough to show."""
    value: Any = error["input"]
    if not isinstance(value, str | int | float | bool) or error["type"].endswith("_type"):
        return ""
    text = repr(value)
    return f", not {text}" if len(text) <= _MAX_SHOWN_CHARACTERS else ""
