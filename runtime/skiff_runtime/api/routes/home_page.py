"""The home page at ``/``: state, load and a chat box in one static file, which reads the service's other endpoints."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Response

from skiff_runtime import contract
from skiff_runtime.api.routes.openapi import text_response

_FILE: Final = Path(__file__).with_suffix(".html")
_INLINE: Final = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def make_home_page_routes() -> APIRouter:
    """Return the home page."""
    router = APIRouter(tags=["service"])

    @router.get(
        contract.PATH_HOME,
        summary="Show the home page",
        response_class=Response,
        responses=text_response("text/html"),
    )
    async def home_page() -> Response:
        """Show the service's state and load, and a chat box, to people. The page itself contains no data."""
        content, policy = _read_page()
        return Response(
            content,
            media_type="text/html",
            headers={
                "content-security-policy": policy,
                "x-frame-options": "DENY",
                "x-content-type-options": "nosniff",
                "referrer-policy": "no-referrer",
                "cache-control": "no-cache",
            },
        )

    return router


@cache
def _read_page() -> tuple[bytes, str]:
    """Return the page and its Content-Security-Policy, read at the first request.

    The policy lets the browser run the script and the styles that are in the file, by their hashes, and send requests
    to this service only. It refuses everything else, so that no text of a model or a user becomes code.
    """
    content = _FILE.read_bytes()
    hashes: dict[bytes, str] = {}
    for name, source in _INLINE.findall(content):
        hashes[name] = f"'sha256-{base64.b64encode(hashlib.sha256(source).digest()).decode()}'"
    policy = {
        "default-src": "'none'",
        "script-src": hashes[b"script"],
        "style-src": hashes[b"style"],
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return content, "; ".join(f"{name} {value}" for name, value in policy.items())
