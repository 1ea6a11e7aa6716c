"""Bodies of error responses, for the OpenAPI document."""

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """The error, and what to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Any error, in OpenAI's shape."""

    error: ErrorDetail
