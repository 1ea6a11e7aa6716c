"""The base of every request body."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """No coercion, no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def exactly_one(*names: str) -> dict[str, Any]:
    """Return what the JSON schema of a body adds, exactly one of whose fields ``names`` must be there and not null."""
    return {
        "oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]
    }
