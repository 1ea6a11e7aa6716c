"""Pages of metrics at addresses of the loopback network, as serving pods have them at their own."""

import http.server
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from skiff_runtime.contract import API_PORT

BOUNDS = (0.1, 0.25, 1.0, 2.5, 10.0)


class MetricsPage:
    """A page whose text may change while it is served; `reads` counts the requests for it."""

    def __init__(self, text: str = "") -> None:
        self.text = text
        self.reads = 0


@contextmanager
def served(address: str, page: MetricsPage) -> Iterator[None]:
    """Serve a page at an address of the loopback network, at the port of serving pods."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page.reads += self.path == "/metrics"
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(b"# The rest arrives later.\n")
            time.sleep(0.05)
            self.wfile.write(page.text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer((address, API_PORT), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def request_counts(
    finished: int, failed: int = 0, first_tokens: Sequence[float] = (), aborted: int = 0
) -> str:
    """The part of a page that counts requests by outcome, and these times to first token."""
    outcomes = {"finished": finished, "failed": failed, "aborted": aborted, "rejected": aborted}
    lines = [
        f'skiff_requests_total{{outcome="{outcome}",endpoint="{endpoint}"}} {count if endpoint == "chat" else 0}.0'
        for outcome, count in outcomes.items()
        for endpoint in ("chat", "completions")
    ]
    lines += [
        f'skiff_time_to_first_token_seconds_bucket{{le="{bound:g}"}} {sum(each <= bound for each in first_tokens)}.0'
        for bound in BOUNDS
    ]
    lines.append(f'skiff_time_to_first_token_seconds_bucket{{le="+Inf"}} {len(first_tokens)}.0')
    return "# TYPE skiff_requests_total counter\n" + "\n".join(lines) + "\n"
