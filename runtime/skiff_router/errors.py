"""Errors that the router itself answers with, beside those of pods, which are passed on."""

from skiff_runtime.errors import RequestError


class BadGateway(RequestError):
    """The pod's connection failed where the request cannot be retried, or every attempt failed."""

    status = 502
    kind = "bad_gateway_error"
    code = "upstream_failed"


class GatewayTimeout(RequestError):
    """The pod sent no byte of its response in time."""

    status = 504
    kind = "gateway_timeout_error"
    code = "upstream_timeout"


class PathNotFound(RequestError):
    """The router has no such path, and passes none on to pods."""

    status = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path takes another method."""

    status = 405
    code = "method_not_allowed"
