"""Bodies of HTTP responses from pods, read whole and within a limit."""

import aiohttp


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body, cut off after `limit` bytes; a single read of the stream returns no more than has arrived."""
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) >= limit:
            break
    return bytes(body[:limit])
