"""Engines in bfloat16 with heads of 128, which FlashInfer supports, behind a scheduler; and bounds of their errors."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from engine_driver import make_config, make_engine
from scheduler_bench import MemoryChannel, Replies
from tiny_models import load_reference, make_model, oracle_logits
from tiny_tokenizer import EOS_ID

from skiff_runtime.messages import AbortRequest, FlushCache, GenerateRequest, TokenBatch
from skiff_runtime.scheduler.scheduler import Scheduler
from skiff_runtime.step import StepHandle, StepPlan

DEVIATIONS: Final = 4
"""Standard deviations by which a difference of errors may exceed its expectation."""
SETTINGS: Final[dict[str, Any]] = {"dtype": "bfloat16", "device": "cuda", "page_size": 16}
FLUSH: Final = -2


def make_wide_model(directory: Path, family: str, *, seed: int = 41, **overrides: Any) -> Path:
    """Make a model in bfloat16 with four query heads of 128 dimensions per KV head.

    ``overrides`` replace further fields of the configuration.
    """
    return make_model(
        directory,
        family,
        seed=seed,
        dtype=torch.bfloat16,
        hidden_size=256,
        intermediate_size=512,
        head_dim=128,
        num_attention_heads=8,
        num_key_value_heads=2,
        **overrides,
    )


def known_logits(
    path: Path, dtype: torch.dtype, prompts: list[list[int]], outputs: list[list[int]]
) -> list[torch.Tensor]:
    """Compute transformers' logits of each output's tokens, float64 [N, vocab], by a model in ``dtype`` on the GPU."""
    oracle = load_reference(path, dtype).cuda()
    with torch.device("cuda"):
        return [rows.cpu().double() for rows in oracle_logits(oracle, prompts, outputs)]


def error_of(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the root mean square error of logits [N, vocab] in bfloat16 against those in float32.

    Errors are relative to each row's largest logit.
    """
    largest = exact.abs().amax(-1, keepdim=True)
    return float(((rounded.double() - exact) / largest).square().mean().sqrt())


def tie_of(error: float) -> float:
    """Return the largest gap of two logits, relative like ``error``, at which another engine may choose the other token.

    Each of the two logits has an ``error`` in each of the two engines, which makes twice the error of one. It is a bound
    for single tokens; the number of tokens that differ is the stronger check.
    """
    return DEVIATIONS * 2 * error


@dataclass
class Served:
    """Replies, rows (starts and lengths) of each step, number of preemptions, and pages that were not freed."""

    replies: Replies = field(default_factory=Replies)
    steps: list[tuple[list[int], list[int]]] = field(default_factory=list)
    preempted: int = 0
    lost_pages: int = -1

    def take(self, batch: TokenBatch) -> None:
        self.replies.take(batch)
        self.preempted += batch.stats.preempted
        self.lost_pages = batch.stats.pages_total - batch.stats.pages_free


class _RecordingEngine:
    """Passes steps to an engine and records their rows."""

    def __init__(self, engine: Any, served: Served) -> None:
        self._engine = engine
        self._served = served

    def launch(self, plan: StepPlan) -> StepHandle:
        self._served.steps.append((plan.starts.tolist(), plan.lengths.tolist()))
        handle: StepHandle = self._engine.launch(plan)
        return handle


def serve(
    path: Path, requests: Sequence[GenerateRequest], *, aborted: Collection[int] = (), **changes: Any
) -> Served:
    """Serve requests that arrive at once; abort the ``aborted`` in the turn after their first token; flush the cache."""
    settings = {**SETTINGS, "log_level": "debug", **changes}
    config, engine = make_config(path, **settings), make_engine(path, **settings)
    engine.warmup()
    served, channel, left = Served(), MemoryChannel(), list(aborted)
    scheduler = Scheduler(
        config,
        eos_token_ids=(EOS_ID,),
        num_pages=engine.num_pages,
        engine=_RecordingEngine(engine, served),
        channel=channel,
    )
    channel.arriving.extend(requests)
    while channel.arriving or not scheduler.is_idle:
        scheduler.turn()
        while channel.sent:
            served.take(channel.sent.popleft())
        due = [uid for uid in left if uid in served.replies and served.replies[uid].tokens]
        left = [uid for uid in left if uid not in due]
        channel.arriving.extend(AbortRequest(uid) for uid in due)
    channel.arriving.append(FlushCache(FLUSH))
    scheduler.turn()
    served.take(channel.sent.popleft())
    scheduler.check()
    engine.close()
    return served
