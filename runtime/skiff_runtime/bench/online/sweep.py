"""From the flags of ``skiff bench serve`` to one plan for each request rate."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from skiff_runtime.bench.flag_types import Span
from skiff_runtime.bench.online.arrival_trace import Arrival, at_rate, read_trace
from skiff_runtime.bench.online.dataset import read_dataset
from skiff_runtime.bench.online.load_generator import Limits
from skiff_runtime.bench.online.runner import Plan, served_model
from skiff_runtime.bench.workload import (
    Prefixes,
    Sample,
    arrivals,
    random_texts,
    random_tokens,
    shared_prefixes,
    shared_texts,
)
from skiff_runtime.errors import ConfigError

DEFAULT_RATE = 4.0
DEFAULT_PROMPTS = 100
DEFAULT_INPUT = Span(128, 128)
DEFAULT_OUTPUT = Span(64, 64)
RECORDED = "recorded"
"""What a run is called that keeps the arrivals of its trace."""


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement of a sweep, and the warm-up before it."""

    rate: str
    plan: Plan
    warm_up: Plan


def runs(arguments: argparse.Namespace) -> Iterator[Run]:
    """A run for each rate; each has prompts of its own, so that none finds another's in a prefix cache.

    ConfigError where flags do not go together or a file is malformed, before anything is sent.
    """
    _check(arguments)
    trace = read_trace(arguments.trace, arguments.trace_unit) if arguments.trace else None
    model = arguments.model or served_model(arguments.url, key=arguments.api_key)
    for index, rate in enumerate(_rates(arguments)):
        generator = np.random.default_rng([arguments.seed, index])
        samples, extra = _samples(arguments, trace, generator)
        plan = Plan(
            url=arguments.url,
            model=model,
            endpoint=arguments.endpoint,
            key=arguments.api_key,
            samples=samples,
            arrivals=_arrivals(len(samples), rate, trace, generator),
            temperature=arguments.temperature,
            seed=arguments.seed,
            ignore_eos=arguments.ignore_eos,
            limits=Limits(arguments.max_concurrency, arguments.timeout_seconds, arguments.max_seconds),
        )
        warm_up = replace(plan, samples=extra, arrivals=[0.0] * len(extra))
        yield Run(RECORDED if rate is None else f"{rate:g}", plan, warm_up)


def _check(arguments: argparse.Namespace) -> None:
    sources = {
        "--trace": arguments.trace,
        "--dataset": arguments.dataset,
        "--prefix-groups": arguments.prefix_groups,
    }
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} both say what to send; give one of them")
    if arguments.prefix_groups is not None and arguments.num_prompts is not None:
        raise ConfigError(
            "--prefix-groups times --prompts-per-group is the number of prompts; leave out --num-prompts"
        )
    if arguments.trace is not None and (arguments.input_len or arguments.output_len):
        raise ConfigError("--trace tells the lengths; leave out --input-len and --output-len")
    if arguments.plot is not None and not any(_is_drawn(rate) for rate in _rates(arguments)):
        raise ConfigError(
            "--plot draws latencies over request rates; give --request-rate finite ones, as in 1,2,4"
        )


def _is_drawn(rate: float | None) -> bool:
    return rate is not None and math.isfinite(rate)


def _rates(arguments: argparse.Namespace) -> list[float | None]:
    """The rates asked for; None keeps a trace's own pace."""
    if arguments.request_rate:
        return list(arguments.request_rate)
    return [None if arguments.trace is not None else DEFAULT_RATE]


def _arrivals(
    count: int, rate: float | None, trace: list[Arrival] | None, generator: np.random.Generator
) -> list[float]:
    if trace is None:
        assert rate is not None
        return arrivals(count, rate, generator)
    recorded = [each.at_seconds for each in trace[:count]]
    return recorded if rate is None else at_rate(recorded, rate)


def _samples(
    arguments: argparse.Namespace, trace: list[Arrival] | None, generator: np.random.Generator
) -> tuple[list[Sample], list[Sample]]:
    """The samples of a run, and of its warm-up."""
    chat, extra = arguments.endpoint == "chat", arguments.warmup
    if trace is not None:
        chosen = trace[: arguments.num_prompts]
        return (
            _of_lengths(arguments, chosen, generator),
            _of_lengths(arguments, [chosen[i % len(chosen)] for i in range(extra)], generator),
        )
    inputs, outputs = arguments.input_len or DEFAULT_INPUT, arguments.output_len or DEFAULT_OUTPUT
    if arguments.prefix_groups is not None:
        prefixes = Prefixes(arguments.prefix_groups, arguments.prompts_per_group, arguments.prefix_len)
        drawn = (
            shared_texts(prefixes, inputs, outputs, generator)
            if chat
            else shared_prefixes(prefixes, inputs, outputs, arguments.vocabulary, generator)
        )
        return drawn, _random(arguments, extra, inputs, outputs, generator)
    count = arguments.num_prompts or DEFAULT_PROMPTS
    if arguments.dataset is not None:
        read = read_dataset(
            arguments.dataset, count + extra, arguments.output_len, chat=chat, generator=generator
        )
    else:
        read = _random(arguments, count + extra, inputs, outputs, generator)
    return read[:count], read[count:]


def _of_lengths(
    arguments: argparse.Namespace, trace: list[Arrival], generator: np.random.Generator
) -> list[Sample]:
    """Random prompts of the recorded lengths."""
    samples: list[Sample] = []
    for each in trace:
        inputs, outputs = (
            Span(each.input_tokens, each.input_tokens),
            Span(each.output_tokens, each.output_tokens),
        )
        samples += _random(arguments, 1, inputs, outputs, generator)
    return samples


def _random(
    arguments: argparse.Namespace, count: int, inputs: Span, outputs: Span, generator: np.random.Generator
) -> list[Sample]:
    if arguments.endpoint == "chat":
        return random_texts(count, inputs, outputs, generator)
    return random_tokens(count, inputs, outputs, arguments.vocabulary, generator)
