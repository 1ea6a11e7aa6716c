"""For which steps the host is thought to be the limit."""

import pytest

from skiff_runtime.config import Config
from skiff_runtime.engine.host import MOST_TOKENS, host_bound_tokens
from skiff_runtime.resolve import resolve


@pytest.mark.parametrize(
    ("shape", "ranks", "least", "most"),
    [
        ("qwen3-0.6b", 1, MOST_TOKENS, MOST_TOKENS),
        ("llama-3.1-8b", 1, 0, 0),
        ("llama-3.1-8b", 2, 100, 300),
        ("qwen3-14b", 1, 0, 0),
    ],
)
def test_small_models_alone_wait_for_the_host(shape: str, ranks: int, least: int, most: int) -> None:
    _, model = resolve(Config(model=f"shape://{shape}", load_format="dummy", device="cpu"))
    assert least <= host_bound_tokens(model, ranks) <= most
