"""From the records of a load to its figures."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from skiff_runtime.bench.online.load_generator import Load
from skiff_runtime.bench.online.request_record import OK, Exchange

PERCENTILES: Final = (50, 90, 99)
LATENCIES: Final = {
    "ttft_ms": "time to first token",
    "itl_ms": "inter-token latency",
    "tpot_ms": "time per further token",
    "e2e_ms": "end to end",
    "client_lag_ms": "client's own lag",
}
Figures = dict[str, Any]


def distribution(milliseconds: Sequence[float]) -> Figures | None:
    """Count, mean and percentiles, or None of nothing."""
    if not milliseconds:
        return None
    values = np.asarray(milliseconds)
    points = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{point}": value for point, value in zip(PERCENTILES, points, strict=True)}
    return {"count": len(values), "mean": float(values.mean()), **named, "max": float(values.max())}


@dataclass(frozen=True, slots=True)
class Objective:
    """What a request must keep to count as good: time to first token, and mean of its inter-token latencies."""

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def met_by(self, exchange: Exchange) -> bool:
        """Whether an answer that came whole came in time."""
        if self.ttft_ms is not None and _ttft(exchange) > self.ttft_ms:
            return False
        return self.itl_ms is None or exchange.output_tokens < 2 or _tpot(exchange) <= self.itl_ms


def summarize(load: Load, seconds: float, objective: Objective) -> Figures:
    """All figures of one run; latencies are of the requests that succeeded.

    Goodput counts the requests that succeeded and met ``objective``, of all that were to be sent.

    Latencies count from the moment a request was written; the client's own lag is how long
    after its due moment that was (for want of CPU, of a connection, or of a place under
    --max-concurrency).
    """
    good = [each for each in load.exchanges if each.failure == OK]
    failures = Counter(each.failure for each in load.exchanges if each.failure != OK)
    if load.unsent:
        failures["not sent"] = load.unsent
    prompt, output = sum(each.prompt_tokens for each in good), sum(each.output_tokens for each in good)
    met, asked = sum(map(objective.met_by, good)), len(load.exchanges) + load.unsent
    return {
        "requests": asked,
        "succeeded": len(good),
        "failures": dict(sorted(failures.items())),
        "failure_examples": _examples(load.exchanges),
        "duration_seconds": seconds,
        "peak_concurrency": load.peak_concurrency,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": len(good) / seconds,
        "slo": asdict(objective),
        "slo_met": met,
        "slo_met_share": met / asked if asked else 0.0,
        "goodput_requests_per_second": met / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
        "ttft_ms": distribution([_ttft(each) for each in good]),
        "itl_ms": distribution([1e3 * gap for each in good for gap in each.gaps]),
        "tpot_ms": distribution([_tpot(each) for each in good if each.output_tokens > 1]),
        "e2e_ms": distribution([1e3 * (each.ended_at - each.sent_at) for each in good]),
        "client_lag_ms": distribution([1e3 * (each.sent_at - each.due_at) for each in load.exchanges]),
    }


def _ttft(exchange: Exchange) -> float:
    return 1e3 * (exchange.first_at - exchange.sent_at)


def _tpot(exchange: Exchange) -> float:
    return 1e3 * (exchange.last_at - exchange.first_at) / (exchange.output_tokens - 1)


def _examples(exchanges: Sequence[Exchange]) -> dict[str, str]:
    """What the first failure of each kind said."""
    found: dict[str, str] = {}
    for each in exchanges:
        if each.failure != OK and each.detail:
            found.setdefault(each.failure, " ".join(each.detail.split())[:300])
    return dict(sorted(found.items()))
