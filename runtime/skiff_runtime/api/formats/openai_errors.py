"""Errors of a generation request in OpenAI's shape, as a whole response and as the last event of a stream."""

from skiff_runtime.api.http.responses import error_body
from skiff_runtime.messages import RequestFailed


class OpenAIErrorFormatter:
    """The part of a ``ResponseFormatter`` that writes errors, for the endpoints that answer as OpenAI's API does."""

    def format_error(self, error: RequestFailed, request_id: str) -> bytes:
        return error_body(error)

    def format_error_event(self, error: RequestFailed, request_id: str) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"
