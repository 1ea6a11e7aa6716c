"""A well-behaved client in its own process, which streams without end and measures inter-token latency (ITL).

``python itl_client.py URL`` prints one JSON line for each line that it reads: the latencies since the line before.
"""

import http.client
import json
import select
import sys
import time
from typing import Any, Final
from urllib.parse import urlsplit

TOKENS: Final = 1000
MAX_LATENCIES: Final = 1_000_000
_BODY: Final = json.dumps(
    {"token_ids": [11, 12, 13], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
)


def main(url: str) -> None:
    """Stream until standard input ends."""
    parts = urlsplit(url)
    latencies: list[float] = []
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
            if last and len(latencies) < MAX_LATENCIES:
                latencies.append(now - last)
            last = now
            if has_input():
                if not sys.stdin.readline():
                    return
                print(json.dumps(summary(latencies)), flush=True)
                latencies.clear()
        connection.close()


def has_input() -> bool:
    """Return whether standard input has a line, or has ended."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def summary(latencies: list[float]) -> dict[str, Any]:
    """Return percentiles of the latencies in milliseconds."""
    if not latencies:
        return {"tokens": 0}
    ordered = sorted(latencies)

    def percentile(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return {
        "tokens": len(latencies),
        "p50_ms": percentile(0.5),
        "p99_ms": percentile(0.99),
        "max_ms": percentile(1.0),
    }


if __name__ == "__main__":
    main(sys.argv[1])
