"""Sweep over request rates: turns the flags of ``skiff bench serve`` into a load plan for each rate."""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from skiff_runtime.bench.flag_types import LengthRange
from skiff_runtime.bench.online.arrival_trace import BLOCKS, Arrival, read_trace, scale_to_rate
from skiff_runtime.bench.online.dataset import read_dataset
from skiff_runtime.bench.online.load_generator import LoadLimits
from skiff_runtime.bench.online.runner import CHAT, LoadPlan, fetch_served_model
from skiff_runtime.bench.workload import (
    PrefixGroups,
    Prompt,
    SampleRequest,
    draw_arrivals,
    draw_block_chats,
    draw_block_tokens,
    draw_chat_prompts,
    draw_shared_prefix_chats,
    draw_shared_prefix_tokens,
    draw_token_prompts,
)
from skiff_runtime.errors import ConfigError

RANDOM: Final = "random"
SHAREGPT: Final = "sharegpt"
CUSTOM: Final = "custom"
SHARED_PREFIX: Final = "generated-shared-prefix"
TRACE: Final = "trace"
DATASETS: Final = (RANDOM, SHAREGPT, CUSTOM, SHARED_PREFIX, TRACE)
_FILES: Final = (SHAREGPT, CUSTOM, TRACE)
DEFAULT_RATE: Final = 4.0
DEFAULT_PROMPTS: Final = 100
DEFAULT_INPUT: Final = LengthRange(128, 128)
DEFAULT_OUTPUT: Final = LengthRange(64, 64)
RECORDED: Final = "recorded"
"""Name of the rate of a run that keeps the arrival times of its trace."""


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a sweep, and the warm-up before it."""

    rate: str
    plan: LoadPlan
    warm_up: LoadPlan

    def redirect(self, url: str, model: str, key: str | None) -> "SweepRun":
        """Return the same run against another server."""
        plans = (replace(each, url=url, model=model, key=key) for each in (self.plan, self.warm_up))
        return SweepRun(self.rate, *plans)


def plan_runs(arguments: argparse.Namespace, repetition: int = 0) -> Iterator[SweepRun]:
    """Yield a run for each rate, each with its own prompts, so that no run hits prefixes that another has cached.

    ``repetition``: number of times that all rates have been run before; each has prompts of its own, too.

    Raises:
        ConfigError: flags contradict each other, or a file is malformed; raised before anything is sent.
    """
    _check_flags(arguments)
    trace = (
        read_trace(arguments.dataset_path, arguments.trace_unit) if arguments.dataset_name == TRACE else None
    )
    model = arguments.model or fetch_served_model(arguments.base_url, key=arguments.api_key)
    for index, rate in enumerate(_list_rates(arguments)):
        generator = np.random.default_rng([arguments.seed, index, repetition])
        samples, extra = _draw_samples(arguments, trace, generator)
        plan = LoadPlan(
            url=arguments.base_url,
            model=model,
            backend=arguments.backend,
            key=arguments.api_key,
            samples=samples,
            arrivals=_schedule(len(samples), rate, trace, generator),
            temperature=arguments.temperature,
            seed=arguments.seed,
            ignore_eos=arguments.ignore_eos,
            limits=LoadLimits(arguments.max_concurrency, arguments.timeout_seconds, arguments.max_seconds),
        )
        warm_up = replace(plan, samples=extra, arrivals=[0.0] * len(extra))
        yield SweepRun(RECORDED if rate is None else f"{rate:g}", plan, warm_up)


def _check_flags(arguments: argparse.Namespace) -> None:
    name = arguments.dataset_name
    if name in _FILES and arguments.dataset_path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path")
    if name not in _FILES and arguments.dataset_path is not None:
        raise ConfigError(
            f"--dataset-path needs --dataset-name {', '.join(_FILES[:-1])} or {_FILES[-1]}, not {name}"
        )
    if name == SHARED_PREFIX and arguments.num_prompts is not None:
        raise ConfigError(
            "--gsp-num-groups times --gsp-prompts-per-group is the number of prompts; leave out --num-prompts"
        )
    if name == TRACE and (arguments.input_len or arguments.output_len):
        raise ConfigError("a trace contains the lengths; leave out --input-len and --output-len")
    if (
        arguments.compare is None
        and arguments.plot is not None
        and not any(_is_finite(rate) for rate in _list_rates(arguments))
    ):
        raise ConfigError(
            "--plot draws latencies over request rates; give finite ones, as in --request-rate 1,2,4"
        )


def _is_finite(rate: float | None) -> bool:
    return rate is not None and math.isfinite(rate)


def _list_rates(arguments: argparse.Namespace) -> list[float | None]:
    """Return the requested rates; None keeps a trace's own arrival times."""
    if arguments.request_rate:
        return list(arguments.request_rate)
    return [None if arguments.dataset_name == TRACE else DEFAULT_RATE]


def _schedule(
    count: int, rate: float | None, trace: list[Arrival] | None, generator: np.random.Generator
) -> list[float]:
    """Return the arrival time of each request."""
    if trace is None:
        assert rate is not None
        return draw_arrivals(count, rate, generator)
    recorded = [each.at_seconds for each in trace[:count]]
    return recorded if rate is None else scale_to_rate(recorded, rate)


def _draw_samples(
    arguments: argparse.Namespace, trace: list[Arrival] | None, generator: np.random.Generator
) -> tuple[list[SampleRequest], list[SampleRequest]]:
    """Return the requests of a run, and those of its warm-up."""
    is_chat, extra = arguments.backend == CHAT, arguments.num_warmups
    if trace is not None:
        chosen = trace[: arguments.num_prompts]
        return (
            _draw_like_trace(arguments, chosen, generator),
            _draw_like_trace(arguments, [chosen[i % len(chosen)] for i in range(extra)], generator),
        )
    inputs, outputs = arguments.input_len or DEFAULT_INPUT, arguments.output_len or DEFAULT_OUTPUT
    if arguments.dataset_name == SHARED_PREFIX:
        shape = PrefixGroups(
            arguments.gsp_num_groups, arguments.gsp_prompts_per_group, arguments.gsp_system_prompt_len
        )
        drawn = (
            draw_shared_prefix_chats(shape, inputs, outputs, generator)
            if is_chat
            else draw_shared_prefix_tokens(shape, inputs, outputs, arguments.vocab_size, generator)
        )
        return drawn, _draw_random(arguments, extra, inputs, outputs, generator)
    count = arguments.num_prompts or DEFAULT_PROMPTS
    if arguments.dataset_name == RANDOM:
        read = _draw_random(arguments, count + extra, inputs, outputs, generator)
    else:
        read = read_dataset(
            arguments.dataset_path,
            count + extra,
            arguments.output_len,
            is_sharegpt=arguments.dataset_name == SHAREGPT,
            is_chat=is_chat,
            generator=generator,
        )
    return read[:count], read[count:]


def _draw_like_trace(
    arguments: argparse.Namespace, trace: list[Arrival], generator: np.random.Generator
) -> list[SampleRequest]:
    """Draw random prompts of the recorded lengths, with the blocks in common that the trace's prompts have."""
    if any(each.block_ids for each in trace):
        return _draw_blocks_of_trace(arguments, trace, generator)
    samples: list[SampleRequest] = []
    for each in trace:
        inputs = LengthRange(each.input_tokens, each.input_tokens)
        outputs = LengthRange(each.output_tokens, each.output_tokens)
        samples += _draw_random(arguments, 1, inputs, outputs, generator)
    return samples


def _draw_blocks_of_trace(
    arguments: argparse.Namespace, trace: list[Arrival], generator: np.random.Generator
) -> list[SampleRequest]:
    size: int = arguments.trace_block_size
    for each in trace:
        if not each.input_tokens - size < len(each.block_ids) * size < each.input_tokens + size:
            raise ConfigError(
                f"--dataset-path: {each.input_tokens} tokens of a prompt have {len(each.block_ids)} {BLOCKS}, which is not one "
                f"for each {size}; give the trace's --trace-block-size"
            )
    prompts = [(each.input_tokens, each.block_ids) for each in trace]
    drawn: Sequence[Prompt] = (
        draw_block_chats(prompts, size, generator)
        if arguments.backend == CHAT
        else draw_block_tokens(prompts, size, arguments.vocab_size, generator)
    )
    return [SampleRequest(prompt, each.output_tokens) for prompt, each in zip(drawn, trace, strict=True)]


def _draw_random(
    arguments: argparse.Namespace,
    count: int,
    inputs: LengthRange,
    outputs: LengthRange,
    generator: np.random.Generator,
) -> list[SampleRequest]:
    if arguments.backend == CHAT:
        return draw_chat_prompts(count, inputs, outputs, generator)
    return draw_token_prompts(count, inputs, outputs, arguments.vocab_size, generator)
