"""Models in bfloat16 with heads of 128, which FlashInfer supports, and bounds of their engines' errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import serving_engine
import torch
from serving_engine import Served
from tiny_models import load_reference, make_model, oracle_logits

from skiff_runtime.messages import GenerateRequest

DEVIATIONS: Final = 4
"""Standard deviations by which a difference of errors may exceed its expectation."""
SETTINGS: Final[dict[str, Any]] = {"dtype": "bfloat16", "device": "cuda", "page_size": 16}


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
    """Compute transformers' logits of each output's tokens, float64 [N, vocab], by a model in ``dtype`` on a GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    oracle = load_reference(path, dtype).to(device)
    with device:
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


def serve(path: Path, requests: Sequence[GenerateRequest], **changes: Any) -> Served:
    """Serve requests as ``serving_engine.serve`` does, in bfloat16 on a GPU."""
    return serving_engine.serve(path, requests, **{**SETTINGS, **changes})
