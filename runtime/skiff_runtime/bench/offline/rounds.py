"""Rounds of ``skiff bench offline``: the workload from which they are drawn, and the results of each."""

import argparse
from dataclasses import dataclass
from typing import cast

import numpy as np

from skiff_runtime.bench.flag_types import LengthRange
from skiff_runtime.bench.offline.roofline import DevicePeaks, RequestShape, RooflineTime
from skiff_runtime.bench.offline.step_times import StepTimes
from skiff_runtime.bench.workload import (
    PrefixGroups,
    SampleRequest,
    draw_shared_prefix_tokens,
    draw_token_prompts,
)
from skiff_runtime.config import Config
from skiff_runtime.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """Distribution of the requests of a round. ``lengths`` are those of prompts (without prefix) and of outputs."""

    lengths: tuple[LengthRange, LengthRange]
    groups: PrefixGroups | None
    count: int
    vocab_size: int
    generator: np.random.Generator

    def draw_round(self) -> list[SampleRequest]:
        """Draw the requests of the next round."""
        inputs, outputs = self.lengths
        if self.groups is None:
            return draw_token_prompts(self.count, inputs, outputs, self.vocab_size, self.generator)
        return draw_shared_prefix_tokens(self.groups, inputs, outputs, self.vocab_size, self.generator)

    def shapes_of(self, samples: list[SampleRequest]) -> list[RequestShape]:
        """Return the lengths of requests, and the groups that share a prefix."""
        if self.groups is None:
            return [
                RequestShape(len(each.prompt), each.output_tokens, group=number)
                for number, each in enumerate(samples)
            ]
        numbers: dict[tuple[int, ...], int] = {}
        shapes = []
        for each in samples:
            prefix = tuple(token_ids(each)[: self.groups.tokens])
            group = numbers.setdefault(prefix, len(numbers))
            shapes.append(RequestShape(len(each.prompt), each.output_tokens, self.groups.tokens, group))
        return shapes


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark: the resolved configuration, the model, the flags, the workload and the device's peak rates."""

    config: Config
    model: ModelConfig
    arguments: argparse.Namespace
    workload: Workload
    peaks: DevicePeaks | None


@dataclass(frozen=True, slots=True)
class Round:
    """Results of one round. ``roofline``: the least time that its requests could take on this device."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: StepTimes
    roofline: RooflineTime | None = None


def token_ids(sample: SampleRequest) -> list[int]:
    """Return the prompt of an offline request, which is always one of token ids."""
    return cast(list[int], sample.prompt)
