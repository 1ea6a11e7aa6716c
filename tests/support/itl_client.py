"""A well-behaved client in a process of its own: it streams without end and times the gaps between tokens.

``python steady_client.py URL`` prints one JSON line for each line that it reads: the gaps since the one before.
"""

import http.client
import json
import select
import sys
import time
from typing import Any, Final
from urllib.parse import urlsplit

TOKENS: Final = 1000
MAX_GAPS: Final = 1_000_000
_BODY: Final = json.dumps(
    {"token_ids": [11, 12, 13], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
)


def main(url: str) -> None:
    """Stream until standard input ends."""
    parts = urlsplit(url)
    gaps: list[float] = []
    while True:
        assert parts.hostname
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        connection.request("POST", "/generate", _BODY, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        last = 0.0
        while line := response.readline():
            if not line.startswith(b'data: {"id"'):
                continue
            now = time.perf_counter()
            if last and len(gaps) < MAX_GAPS:
                gaps.append(now - last)
            last = now
            if asked():
                if not sys.stdin.readline():
                    return
                print(json.dumps(summary(gaps)), flush=True)
                gaps.clear()
        connection.close()


def asked() -> bool:
    """Whether somebody wants to know."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def summary(gaps: list[float]) -> dict[str, Any]:
    """Inter-token latencies in milliseconds."""
    if not gaps:
        return {"tokens": 0}
    ordered = sorted(gaps)

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return {"tokens": len(gaps), "p50_ms": at(0.5), "p99_ms": at(0.99), "max_ms": at(1.0)}


if __name__ == "__main__":
    main(sys.argv[1])
