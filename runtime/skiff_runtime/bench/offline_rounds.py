"""What ``skiff bench offline`` measures: rounds of the same work over new prompts."""

import argparse
from dataclasses import dataclass
from typing import cast

import numpy as np

from skiff_runtime.bench.offline.roofline import Floor, Load, Rates
from skiff_runtime.bench.offline.step_times import StepTimes
from skiff_runtime.bench.offline_options import lengths, prefixes
from skiff_runtime.bench.workload import Sample, random_tokens, shared_prefixes
from skiff_runtime.config import Config
from skiff_runtime.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did; ``floor`` is the least time that its work could take here."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    steps: StepTimes
    floor: Floor | None = None


@dataclass(frozen=True, slots=True)
class Bench:
    """One measurement: what is asked for, and on what."""

    config: Config
    model: ModelConfig
    arguments: argparse.Namespace
    generator: np.random.Generator
    rates: Rates | None

    def draw(self) -> tuple[list[Sample], list[Load]]:
        """New prompts for a round, and how much work each is."""
        inputs, outputs = lengths(self.arguments)
        vocabulary, plan = self.model.vocab_size, prefixes(self.arguments)
        if plan is None:
            count = self.arguments.num_requests
            samples = random_tokens(count, inputs, outputs, vocabulary, self.generator)
            return samples, [
                Load(len(each.prompt), each.output_tokens, group=number)
                for number, each in enumerate(samples)
            ]
        samples = shared_prefixes(plan, inputs, outputs, vocabulary, self.generator)
        numbers: dict[tuple[int, ...], int] = {}
        loads = []
        for each in samples:
            prefix = tuple(cast(list[int], each.prompt)[: plan.tokens])
            group = numbers.setdefault(prefix, len(numbers))
            loads.append(Load(len(each.prompt), each.output_tokens, plan.tokens, group))
        return samples, loads
