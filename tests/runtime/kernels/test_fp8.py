"""FP8 weights and FP8 KV cache: the arithmetic, and the tokens of whole models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import PROMPTS, generate_greedy, quantize_linear_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import load_reference, make_model, oracle_choices
from transformers import DynamicCache

from skiff_runtime.kernels.fp8 import fp8_linear, fp8_linear_into, quantize_activations
from skiff_runtime.kernels.fp8_tensors import (
    E4M3,
    FP8_MAX,
    FP8Weight,
    cast_to_fp8,
    quantize_rows,
)
from skiff_runtime.kernels.kv_store import store_kv


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
@settings(max_examples=200)
def test_quantized_rows_keep_three_mantissa_bits_and_the_largest_value(row: list[float]) -> None:
    values = torch.tensor([row])
    quantized, scales = quantize_rows(values)
    assert quantized.dtype == E4M3 and scales.shape == (1, 1)
    back = quantized.double() * scales.double()
    step = scales.double() * 2.0**-9  # between the smallest FP8 numbers
    assert ((back - values.double()).abs() <= values.double().abs() / 16 + step).all()
    if values.abs().max() > 1e-8:
        assert back.abs().max().item() == pytest.approx(values.abs().max().item(), rel=1e-5)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), st.floats(0.5, 1e6, width=32))
def test_values_beyond_the_bound_become_the_bound(row: list[float], bound: float) -> None:
    values = torch.tensor([row])
    quantized, scales = quantize_rows(values, bound)
    expected, expected_scales = quantize_rows(values.clamp(-bound, bound))
    assert torch.equal(quantized.float(), expected.float()) and torch.equal(scales, expected_scales)


def test_cast_to_fp8_saturates() -> None:
    given = torch.tensor([500.0, -1e30, float("inf"), 449.0, 0.0])
    assert cast_to_fp8(given).float().tolist() == [FP8_MAX, -FP8_MAX, FP8_MAX, FP8_MAX, 0.0]


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_fp8_linear_equals_the_product_of_the_quantized_values(tokens: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    x, unquantized = torch.randn(tokens, 48) * 3, torch.randn(32, 48)
    added = torch.randn(32) if bias else None
    values, scales = quantize_rows(unquantized)
    x_values, x_scales = quantize_rows(x)
    exact = (x_values.double() * x_scales.double()) @ (values.double() * scales.double()).T
    exact = exact if added is None else exact + added.double()
    weight = FP8Weight(values, scales, torch.zeros(32, dtype=torch.int32))
    torch.testing.assert_close(fp8_linear(x, weight, added).double(), exact, rtol=1e-5, atol=1e-4)
    original = x.double() @ unquantized.double().T + (0 if added is None else added.double())
    assert (exact - original).norm() / original.norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_product_of_some_rows_is_written_where_they_belong(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(7, 48) * 3).to(dtype)
    weight = FP8Weight(*quantize_rows(torch.randn(32, 48)), torch.zeros(32, dtype=torch.int32))
    out = torch.zeros(7, 32, dtype=dtype)
    fp8_linear_into(x[2:5], weight, out[2:5], bound=2.0)
    assert torch.equal(out[2:5], fp8_linear(x[2:5], weight, bound=2.0))
    assert not out[:2].any() and not out[5:].any()
    quantized = quantize_activations(x)
    fp8_linear_into(quantized.select_rows(slice(5, 7)), weight, out[5:])
    assert torch.equal(out[5:], fp8_linear(quantized, weight)[5:])


def test_fp8_pool_stores_keys_and_values_and_saturates() -> None:
    torch.manual_seed(0)
    pool = (torch.zeros(6, 2, 4, dtype=E4M3), torch.zeros(6, 2, 4, dtype=E4M3))
    keys, values = torch.randn(2, 2, 4), torch.full((2, 2, 4), 1e4)
    store_kv(keys, values, pool, torch.tensor([4, 1]))
    assert torch.equal(pool[0][[4, 1]].float(), cast_to_fp8(keys).float())
    assert (pool[1][[4, 1]].float() == FP8_MAX).all()
    assert all((side[[0, 2, 3, 5]].float() == 0).all() for side in pool)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fp8_weights_give_the_tokens_of_transformers_with_quantized_layers(
    tmp_path: Path, family: str
) -> None:
    path = make_model(tmp_path, family)
    outputs = generate_greedy(path, quantization="fp8")
    oracle = load_reference(path)
    quantize_linear_layers(oracle)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs


class FP8Cache(DynamicCache):  # type: ignore[misc]
    """transformers' cache with keys, rotated already, and values rounded to FP8."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *place: Any, **options: Any) -> Any:
        rounded = [cast_to_fp8(given).to(given.dtype) for given in (keys, values)]
        return super().update(*rounded, *place, **options)


def with_fp8_cache(oracle: Any) -> Callable[..., Any]:
    return lambda ids, **options: oracle(ids, past_key_values=FP8Cache(), **options)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fp8_cache_gives_the_tokens_of_transformers_with_one(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family)
    outputs = generate_greedy(path, kv_cache_dtype="fp8_e4m3")
    oracle = load_reference(path)
    assert oracle_choices(with_fp8_cache(oracle), PROMPTS, outputs) == outputs
    assert oracle_choices(oracle, PROMPTS, outputs) != outputs, (
        "the prompts must be such that rounding changes tokens"
    )


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_fp8_cache_gives_the_same_tokens_for_every_page_size_and_chunk(
    tmp_path: Path, quantization: Any
) -> None:
    path = make_model(tmp_path, "qwen3")
    found = []
    for page_size, budget in ((1, 64), (16, 64), (16, 13)):
        options: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "quantization": quantization}
        found.append(generate_greedy(path, page_size=page_size, budget=budget, **options))
    assert found[0] == found[1] == found[2]


def test_fp8_weights_and_cache_stay_close_to_transformers_with_both(tmp_path: Path) -> None:
    """Some tokens differ: where sums differ in the last bit, activations and keys are rounded differently."""
    path = make_model(tmp_path, "qwen3")
    outputs = generate_greedy(path, kv_cache_dtype="fp8_e4m3", quantization="fp8")
    oracle = load_reference(path)
    quantize_linear_layers(oracle)
    chosen = torch.tensor(oracle_choices(with_fp8_cache(oracle), PROMPTS, outputs))
    assert (chosen == torch.tensor(outputs)).float().mean() > 0.85
