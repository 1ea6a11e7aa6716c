"""A well-behaved client in its own process, which streams without end and measures inter-token latency (ITL).

``python itl_client.py URL TOKENS PAUSE_SECONDS`` streams that many tokens, pauses, and begins again. It prints one JSON
line for each line that it reads: the latencies since the line before.
"""

import http.client
import json
import select
import sys
import time
from typing import Any, Final
from urllib.parse import urlsplit

MAX_LATENCIES: Final = 1_000_000
_FIELDS: Final = {"token_ids": [11, 12, 13], "ignore_eos": True, "temperature": 0, "stream": True}


def main(url: str, tokens: int, pause_seconds: float) -> None:
    """Stream until standard input ends."""
    parts, body = urlsplit(url), json.dumps({**_FIELDS, "max_tokens": tokens})
    latencies: list[float] = []
    while True:
        assert parts.hostname
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
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
        time.sleep(pause_seconds)


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
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
