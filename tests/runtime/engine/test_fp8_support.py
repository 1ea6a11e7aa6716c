"""FP8 is refused on GPUs that lack it, for weights and for the KV cache."""

from typing import Any

import pytest

from skiff_runtime.config import Config
from skiff_runtime.engine.fp8_support import check_fp8_support
from skiff_runtime.errors import ConfigError
from skiff_runtime.layers.weight_format import Fp8Format, Int4Format, choose_weight_format


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization": "fp8"}, r"^weights in fp8 need compute capability 8\.9 or more.*this GPU has 8\.6"),
        ({"kv_cache_dtype": "fp8_e4m3"}, r"^--kv-cache-dtype fp8_e4m3 need compute capability 8\.9"),
    ],
    ids=["weights", "KV cache"],
)
def test_fp8_needs_a_compute_capability(changes: dict[str, Any], message: str) -> None:
    config = Config(model="m", **changes)
    with pytest.raises(ConfigError, match=message):
        check_fp8_support(config, choose_weight_format(config.quantization, None), (8, 6))
    check_fp8_support(config, choose_weight_format(config.quantization, None), (8, 9))
    check_fp8_support(Config(model="m"), None, (7, 5))


@pytest.mark.parametrize("quantization", ["auto", "compressed-tensors"])
def test_fp8_of_a_checkpoint_needs_a_compute_capability_and_integers_do_not(quantization: Any) -> None:
    config = Config(model="m", quantization=quantization)
    with pytest.raises(ConfigError, match=r"^weights in fp8 need compute capability 8\.9"):
        check_fp8_support(config, choose_weight_format(quantization, Fp8Format("block", "group")), (8, 6))
    integers = Int4Format("compressed-tensors", 128, zero_points=False)
    check_fp8_support(config, choose_weight_format(quantization, integers), (8, 6))
