"""Results of a run of load: latencies, throughput, goodput and failures, computed from its records and printed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.console import Console

from skiff_runtime.bench.online.load_generator import LoadGenerator
from skiff_runtime.bench.online.request_record import OK, RequestRecord
from skiff_runtime.bench.report import PERCENTILES, Figures, make_table, summarize_latencies

LATENCIES: Final = {
    "ttft_ms": "time to first token (TTFT)",
    "itl_ms": "inter-token latency (ITL)",
    "tpot_ms": "time per output token (TPOT)",
    "e2e_ms": "end-to-end latency",
    "client_lag_ms": "lag of the client",
}


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """Service-level objective of a request, in milliseconds: its time to first token, and per output token after it."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met_by(self, record: RequestRecord) -> bool:
        """Return whether a complete response meets the objective. One token has no time per output token."""
        if self.ttft_ms is not None and _ttft(record) > self.ttft_ms:
            return False
        return self.tpot_ms is None or record.output_tokens < 2 or _tpot(record) <= self.tpot_ms


def summarize_load(load: LoadGenerator, seconds: float, objective: LatencyObjective) -> Figures:
    """Compute all figures of a run that took ``seconds``.

    Latencies are those of successful requests, from the moment a request was written. The lag of the client is the
    time from its scheduled moment until then, for want of CPU time, a connection, or room under --max-concurrency.
    Goodput counts the successful requests that met ``objective``; its share is of all requests that were to be sent.
    """
    succeeded = [each for each in load.records if each.failure == OK]
    failures = Counter(each.failure for each in load.records if each.failure != OK)
    if load.unsent:
        failures["not sent"] = load.unsent
    prompt = sum(each.prompt_tokens for each in succeeded)
    output = sum(each.output_tokens for each in succeeded)
    met, requests = sum(map(objective.is_met_by, succeeded)), len(load.records) + load.unsent
    return {
        "requests": requests,
        "succeeded": len(succeeded),
        "failures": dict(sorted(failures.items())),
        "failure_examples": _find_examples(load.records),
        "duration_seconds": seconds,
        "peak_concurrency": load.peak_concurrency,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "requests_per_second": len(succeeded) / seconds,
        "slo": asdict(objective),
        "slo_met": met,
        "slo_met_share": met / requests if requests else 0.0,
        "goodput_requests_per_second": met / seconds,
        "output_tokens_per_second": output / seconds,
        "total_tokens_per_second": (prompt + output) / seconds,
        "ttft_ms": summarize_latencies([_ttft(each) for each in succeeded]),
        "itl_ms": summarize_latencies([1e3 * itl for each in succeeded for itl in each.itls]),
        "tpot_ms": summarize_latencies([_tpot(each) for each in succeeded if each.output_tokens > 1]),
        "e2e_ms": summarize_latencies([1e3 * (each.ended_at - each.sent_at) for each in succeeded]),
        "client_lag_ms": summarize_latencies(
            [1e3 * (each.sent_at - each.scheduled_at) for each in load.records]
        ),
    }


def show_load(figures: Figures) -> None:
    """Print the figures of one run."""
    console = Console(highlight=False)
    rows = [
        ("requests", f"{figures['succeeded']} of {figures['requests']} succeeded"),
        ("duration", f"{figures['duration_seconds']:.2f} s"),
        ("throughput", f"{figures['requests_per_second']:.2f} requests/s"),
        ("goodput", _describe_goodput(figures)),
        ("output", f"{figures['output_tokens']} tokens, {figures['output_tokens_per_second']:,.1f} tokens/s"),
        ("prompt and output", f"{figures['total_tokens_per_second']:,.1f} tokens/s"),
        ("peak concurrency", str(figures["peak_concurrency"])),
    ]
    rows += [(f"failed: {kind}", _describe_failure(figures, kind)) for kind in figures["failures"]]
    console.print(make_table(("", ""), rows))
    names = ("mean", *(f"p{point}" for point in PERCENTILES), "max")
    lines = [
        (title, *(f"{figures[key][name]:,.2f}" for name in names))
        for key, title in LATENCIES.items()
        if figures[key] is not None
    ]
    console.print(make_table(("milliseconds", *names), lines))


def show_sweep(runs: Sequence[Figures]) -> None:
    """Print one line for each request rate."""
    heads = ("rate", "req/s", "good/s", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "failed")
    rows = [
        (
            run["request_rate"],
            f"{run['requests_per_second']:.2f}",
            f"{run['goodput_requests_per_second']:.2f}",
            f"{run['output_tokens_per_second']:,.0f}",
            *(_format_percentile(run[key], name) for key in ("ttft_ms", "itl_ms") for name in ("p50", "p99")),
            str(sum(run["failures"].values())),
        )
        for run in runs
    ]
    Console(highlight=False).print(make_table(heads, rows))


def _ttft(record: RequestRecord) -> float:
    return 1e3 * (record.first_at - record.sent_at)


def _tpot(record: RequestRecord) -> float:
    return 1e3 * (record.last_at - record.first_at) / (record.output_tokens - 1)


def _find_examples(records: Sequence[RequestRecord]) -> dict[str, str]:
    """Return the message of the first failure of each kind."""
    found: dict[str, str] = {}
    for each in records:
        if each.failure != OK and each.detail:
            found.setdefault(each.failure, " ".join(each.detail.split())[:300])
    return dict(sorted(found.items()))


def _describe_goodput(figures: Figures) -> str:
    limits = [f"{name[:-3].upper()} {ms:g} ms" for name, ms in figures["slo"].items() if ms is not None]
    within = f"within {' and '.join(limits)}" if limits else "no objective given"
    share = f"{figures['slo_met']} of {figures['requests']}"
    return f"{figures['goodput_requests_per_second']:.2f} requests/s ({share}, {within})"


def _describe_failure(figures: Figures, kind: str) -> str:
    example = figures["failure_examples"].get(kind, "")
    return f"{figures['failures'][kind]}" + (f" ({example})" if example else "")


def _format_percentile(latencies: Figures | None, name: str) -> str:
    return "-" if latencies is None else f"{latencies[name]:,.1f}"
