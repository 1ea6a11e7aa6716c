"""Engines in bfloat16 with heads of 128, which FlashInfer takes, behind a scheduler; and how far their numbers can be off."""

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
"""Standard deviations by which the difference of two errors may be off."""
SETTINGS: Final[dict[str, Any]] = {"dtype": "bfloat16", "device": "cuda", "page_size": 16}
FLUSH: Final = -2


def make_wide_model(directory: Path, family: str, *, seed: int = 41) -> Path:
    """A model in bfloat16 with four query heads of 128 for each KV head."""
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
    )


def known_logits(
    path: Path, dtype: torch.dtype, prompts: list[list[int]], outputs: list[list[int]]
) -> list[torch.Tensor]:
    """Transformers' logits of each output's tokens, float64 [N, vocab], from a model in ``dtype`` on the GPU."""
    oracle = load_reference(path, dtype).cuda()
    with torch.device("cuda"):
        return [rows.cpu().double() for rows in oracle_logits(oracle, prompts, outputs)]


def error_of(rounded: torch.Tensor, exact: torch.Tensor) -> float:
    """How far off logits [N, vocab] in bfloat16 are of those in float32, as a share of each row's largest logit.

    In the mean of squares, over all of them.
    """
    largest = exact.abs().amax(-1, keepdim=True)
    return float(((rounded.double() - exact) / largest).square().mean().sqrt())


def tie_of(error: float) -> float:
    """How far the logits of two tokens may be apart in one engine, as such a share, of which another takes the lesser.

    Each of the two logits has an ``error`` in each of the two engines, which makes twice the error of one. It is a bound for
    single tokens; how many tokens differ tells more.
    """
    return DEVIATIONS * 2 * error


@dataclass
class Served:
    """What the clients heard, the rows of each step (starts and lengths), and what became of the memory."""

    replies: Replies = field(default_factory=Replies)
    steps: list[tuple[list[int], list[int]]] = field(default_factory=list)
    preempted: int = 0
    lost_pages: int = -1

    def take(self, batch: TokenBatch) -> None:
        self.replies.take(batch)
        self.preempted += batch.stats.preempted
        self.lost_pages = batch.stats.pages_total - batch.stats.pages_free


class _Watched:
    """An engine whose steps are noted."""

    def __init__(self, engine: Any, served: Served) -> None:
        self._engine = engine
        self._served = served

    def launch(self, plan: StepPlan) -> StepHandle:
        self._served.steps.append((plan.starts.tolist(), plan.lengths.tolist()))
        handle: StepHandle = self._engine.launch(plan)
        return handle


def serve(
    path: Path, asked: Sequence[GenerateRequest], *, aborted: Collection[int] = (), **changes: Any
) -> Served:
    """Answer requests that come at once; the ``aborted`` end in the turn after their first token. Then the cache is emptied."""
    settings = {**SETTINGS, "log_level": "debug", **changes}
    config, engine = make_config(path, **settings), make_engine(path, **settings)
    engine.warmup()
    served, channel, left = Served(), MemoryChannel(), list(aborted)
    scheduler = Scheduler(
        config,
        eos_token_ids=(EOS_ID,),
        num_pages=engine.num_pages,
        engine=_Watched(engine, served),
        channel=channel,
    )
    channel.arriving.extend(asked)
    while channel.arriving or not scheduler.idle:
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
