"""The figures of ``skiff bench offline``, for people and for programs."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from skiff_runtime.bench import report
from skiff_runtime.bench.offline.profile_breakdown import Breakdown
from skiff_runtime.bench.offline_options import lengths
from skiff_runtime.bench.offline_rounds import Bench, Round
from skiff_runtime.bench.online.results import Figures


def figures(bench: Bench, rounds: Sequence[Round], breakdown: Breakdown | None) -> Figures:
    """Everything that was measured, and by what settings; averages leave out the first of several rounds."""
    arguments, counted = bench.arguments, rounds[1:] or rounds
    inputs, outputs = lengths(arguments)
    seconds = sum(each.seconds for each in counted)
    floors = [each.floor.seconds for each in counted if each.floor is not None]
    return {
        "benchmark": "offline",
        "model": bench.config.model,
        "workload": arguments.workload,
        "requests": arguments.num_requests,
        "input_len": str(inputs),
        "output_len": str(outputs),
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "config": bench.config.public_fields(),
        "rounds": [_round(each) for each in rounds],
        "output_tokens_per_second": sum(each.output_tokens for each in counted) / seconds,
        "rates": None if bench.rates is None else asdict(bench.rates),
        "roofline_ratio": sum(floors) / seconds if floors else None,
        "profile": None if breakdown is None else asdict(breakdown),
    }


def show(rounds: Sequence[Round], found: Figures, breakdown: Breakdown | None) -> None:
    """Print the tables."""
    console = Console(highlight=False)
    heads = ("round", "seconds", "prompt", "found", "output", "output tok/s", "all tok/s", "of roofline")
    console.print(report.table(heads, [_row(number, each, rounds) for number, each in enumerate(rounds, 1)]))
    console.print(report.table(("steps", "count", "seconds", "share", "ms each", "tokens"), _kinds(rounds)))
    if breakdown is not None:
        _show_breakdown(console, breakdown)
    told = f"{found['output_tokens_per_second']:,.1f} output tokens a second"
    if found["roofline_ratio"] is not None:
        told += f", {found['roofline_ratio']:.0%} of the roofline"
    console.print(told)


def _round(each: Round) -> Figures:
    return {
        "seconds": each.seconds,
        "prompt_tokens": each.prompt_tokens,
        "prefill_tokens": each.steps.prefill_tokens,
        "prefix_hit_tokens": each.steps.hit_tokens,
        "output_tokens": each.output_tokens,
        "output_tokens_per_second": each.output_tokens / each.seconds,
        "steps": each.steps.figures(each.seconds),
        "roofline": None if each.floor is None else {**asdict(each.floor), "seconds": each.floor.seconds},
    }


def _row(number: int, each: Round, rounds: Sequence[Round]) -> tuple[str, ...]:
    return (
        f"{number}" + (" (warm-up)" if number == 1 and len(rounds) > 1 else ""),
        f"{each.seconds:.2f}",
        f"{each.prompt_tokens:,}",
        f"{each.steps.hit_tokens:,}",
        f"{each.output_tokens:,}",
        f"{each.output_tokens / each.seconds:,.1f}",
        f"{(each.prompt_tokens + each.output_tokens) / each.seconds:,.1f}",
        "-" if each.floor is None else f"{each.floor.seconds / each.seconds:.0%}",
    )


def _kinds(rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    """By kind, of the last round."""
    last = rounds[-1]
    told = last.steps.figures(last.seconds)
    rows = [
        (
            kind,
            f"{times['steps']:,}",
            f"{times['seconds']:.3f}",
            f"{times['seconds'] / last.seconds:.1%}",
            f"{times['seconds'] / max(1, times['steps']) * 1e3:.3f}",
            f"{times['tokens']:,}",
        )
        for kind, times in told["kinds"].items()
    ]
    outside = told["outside_seconds"]
    return [*rows, ("outside", "", f"{outside:.3f}", f"{outside / last.seconds:.1%}", "", "")]


def _show_breakdown(console: Console, breakdown: Breakdown) -> None:
    span = max(breakdown.span, 1e-9)
    rows = [
        (part, f"{seconds * 1e3:.2f}", f"{seconds / span:.1%}") for part, seconds in breakdown.parts.items()
    ]
    console.print(report.table(("profiled", "ms", "share"), rows))
    names = [(name[:70], f"{seconds * 1e3:.2f}", f"{count:,}") for name, seconds, count in breakdown.largest]
    console.print(report.table(("largest", "ms", "count"), names))
