"""The base of every request body."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """No coercion, no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
