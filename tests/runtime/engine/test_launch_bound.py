"""For which steps the host is thought to be the limit."""

import pytest

from skiff_runtime.config import Config
from skiff_runtime.engine.launch_bound import MOST_TOKENS, launch_bound_tokens
from skiff_runtime.processes.resolve import resolve


@pytest.mark.parametrize(
    ("shape", "ranks", "weight_bytes", "least", "most"),
    [
        ("qwen3-0.6b", 1, 2, MOST_TOKENS, MOST_TOKENS),
        ("llama-3.1-8b", 1, 2, 0, 0),
        ("llama-3.1-8b", 2, 2, 200, 212),
        ("llama-3.1-8b", 1, 1, 200, 212),
        ("qwen3-14b", 1, 2, 0, 0),
        ("qwen3-14b", 1, 1, 0, 0),
        ("qwen3-14b", 2, 1, 270, 280),
    ],
)
def test_small_layers_alone_wait_for_the_host(
    shape: str, ranks: int, weight_bytes: int, least: int, most: int
) -> None:
    _, model = resolve(Config(model=f"shape://{shape}", load_format="dummy", device="cpu"))
    assert least <= launch_bound_tokens(model, ranks, weight_bytes) <= most
