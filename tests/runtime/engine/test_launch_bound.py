"""Numbers of tokens up to which prefill steps count as launch-bound."""

import pytest

from skiff_runtime.config import Config
from skiff_runtime.engine.launch_bound import launch_bound_tokens
from skiff_runtime.kernels.tuning import HOPPER
from skiff_runtime.processes.resolve import resolve


@pytest.mark.parametrize(
    ("shape", "tp_size", "element_bytes", "low", "high"),
    [
        ("qwen3-0.6b", 1, 2, 1024, 1024),
        ("llama-3.1-8b", 1, 2, 0, 0),
        ("llama-3.1-8b", 2, 2, 200, 212),
        ("llama-3.1-8b", 1, 1, 200, 212),
        ("qwen3-14b", 1, 2, 0, 0),
        ("qwen3-14b", 1, 1, 0, 0),
        ("qwen3-14b", 2, 1, 270, 280),
        # One token reads 8 of 128 experts, 56.9 million numbers with attention; 150 million are read meanwhile.
        ("qwen3-30b-a3b", 1, 2, 3, 3),
        ("qwen3-30b-a3b", 1, 1, 9, 9),
        ("qwen3-235b-a22b", 1, 2, 0, 0),
    ],
)
def test_only_small_layers_are_launch_bound(
    shape: str, tp_size: int, element_bytes: int, low: int, high: int
) -> None:
    _, model = resolve(Config(model=f"shape://{shape}", load_format="dummy", device="cpu"))
    assert low <= launch_bound_tokens(model, tp_size, element_bytes, HOPPER.prefill_choice) <= high
