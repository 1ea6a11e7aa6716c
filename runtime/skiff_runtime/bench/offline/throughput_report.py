"""Report of ``skiff bench offline``: its figures as JSON and as tables."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from skiff_runtime.bench.offline.profile_breakdown import Breakdown
from skiff_runtime.bench.offline.rounds import Bench, Round
from skiff_runtime.bench.report import Figures, make_table


def collect_figures(bench: Bench, rounds: Sequence[Round], breakdown: Breakdown | None) -> Figures:
    """Return all results and settings. Averages leave out the first of several rounds, the warm-up."""
    arguments, counted = bench.arguments, rounds[1:] or rounds
    inputs, outputs = bench.workload.lengths
    seconds = sum(each.seconds for each in counted)
    rooflines = [each.roofline.seconds for each in counted if each.roofline is not None]
    return {
        "benchmark": "offline",
        "model": bench.config.model,
        "dataset_name": arguments.dataset_name,
        "num_prompts": arguments.num_prompts,
        "input_len": str(inputs),
        "output_len": str(outputs),
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "lora_adapters": len(bench.config.lora),
        "config": bench.config.public_fields(),
        "rounds": [_round_figures(each) for each in rounds],
        "output_tokens_per_second": sum(each.output_tokens for each in counted) / seconds,
        "device_peaks": None if bench.peaks is None else asdict(bench.peaks),
        "roofline_ratio": sum(rooflines) / seconds if rooflines else None,
        "profile": None if breakdown is None else asdict(breakdown),
    }


def show_results(rounds: Sequence[Round], figures: Figures, breakdown: Breakdown | None) -> None:
    """Print the tables of rounds, steps and kernels, and the throughput."""
    console = Console(highlight=False)
    heads = ("round", "seconds", "prompt", "cached", "output", "output tok/s", "all tok/s", "roofline")
    console.print(
        make_table(heads, [_round_row(number, each, rounds) for number, each in enumerate(rounds, 1)])
    )
    console.print(
        make_table(("steps", "count", "seconds", "share", "ms each", "tokens"), _step_rows(rounds[-1]))
    )
    if breakdown is not None:
        _show_breakdown(console, breakdown)
    line = f"{figures['output_tokens_per_second']:,.1f} output tokens per second"
    if figures["config"]["enable_lora"]:
        line += f", {figures['lora_adapters']} LoRA adapters, {figures['config']['max_loras']} slots"
    if figures["roofline_ratio"] is not None:
        line += f", {figures['roofline_ratio']:.0%} of the roofline"
    console.print(line)


def _round_figures(each: Round) -> Figures:
    return {
        "seconds": each.seconds,
        "prompt_tokens": each.prompt_tokens,
        "prefill_tokens": each.steps.prefill_tokens,
        "prefix_hit_tokens": each.steps.hit_tokens,
        "output_tokens": each.output_tokens,
        "output_tokens_per_second": each.output_tokens / each.seconds,
        "steps": each.steps.figures(each.seconds),
        "roofline": None
        if each.roofline is None
        else {**asdict(each.roofline), "seconds": each.roofline.seconds},
    }


def _round_row(number: int, each: Round, rounds: Sequence[Round]) -> tuple[str, ...]:
    return (
        f"{number}" + (" (warm-up)" if number == 1 and len(rounds) > 1 else ""),
        f"{each.seconds:.2f}",
        f"{each.prompt_tokens:,}",
        f"{each.steps.hit_tokens:,}",
        f"{each.output_tokens:,}",
        f"{each.output_tokens / each.seconds:,.1f}",
        f"{(each.prompt_tokens + each.output_tokens) / each.seconds:,.1f}",
        "-" if each.roofline is None else f"{each.roofline.seconds / each.seconds:.0%}",
    )


def _step_rows(last: Round) -> list[tuple[str, ...]]:
    figures = last.steps.figures(last.seconds)
    rows = [
        (
            kind,
            f"{times['steps']:,}",
            f"{times['seconds']:.3f}",
            f"{times['seconds'] / last.seconds:.1%}",
            f"{times['seconds'] / max(1, times['steps']) * 1e3:.3f}",
            f"{times['tokens']:,}",
        )
        for kind, times in figures["kinds"].items()
    ]
    outside = figures["outside_seconds"]
    return [*rows, ("outside", "", f"{outside:.3f}", f"{outside / last.seconds:.1%}", "", "")]


def _show_breakdown(console: Console, breakdown: Breakdown) -> None:
    span = max(breakdown.span, 1e-9)
    rows = [
        (kind, f"{seconds * 1e3:.2f}", f"{seconds / span:.1%}") for kind, seconds in breakdown.kinds.items()
    ]
    console.print(make_table(("profiled", "ms", "share"), rows))
    names = [(name[:70], f"{seconds * 1e3:.2f}", f"{count:,}") for name, seconds, count in breakdown.largest]
    console.print(make_table(("largest", "ms", "count"), names))
