"""Eight-bit weights and KV cache: the arithmetic, and what becomes of tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8_checkpoints import PROMPTS, own_tokens, round_linear_layers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import load_reference, make_model, oracle_choices
from transformers import DynamicCache

from skiff_runtime.kernels.e4m3 import E4M3, FP8_MAX, Matrix, cast_to_fp8, quantize_rows
from skiff_runtime.kernels.fp8 import fp8_linear
from skiff_runtime.kernels.kv_store import store_kv


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40))
@settings(max_examples=200)
def test_rounding_keeps_three_bits_and_the_largest(row: list[float]) -> None:
    values = torch.tensor([row])
    rounded, scales = quantize_rows(values)
    assert rounded.dtype == E4M3 and scales.shape == (1, 1)
    back = rounded.double() * scales.double()
    step = scales.double() * 2.0**-9  # that of the smallest numbers
    assert ((back - values.double()).abs() <= values.double().abs() / 16 + step).all()
    if values.abs().max() > 1e-8:
        assert back.abs().max().item() == pytest.approx(values.abs().max().item(), rel=1e-5)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), st.floats(0.5, 1e6, width=32))
def test_what_a_row_holds_beyond_the_bound_becomes_the_bound(row: list[float], bound: float) -> None:
    values = torch.tensor([row])
    rounded, scales = quantize_rows(values, bound)
    cut, wanted = quantize_rows(values.clamp(-bound, bound))
    assert torch.equal(rounded.float(), cut.float()) and torch.equal(scales, wanted)


def test_what_is_too_large_becomes_the_largest() -> None:
    given = torch.tensor([500.0, -1e30, float("inf"), 449.0, 0.0])
    assert cast_to_fp8(given).float().tolist() == [FP8_MAX, -FP8_MAX, FP8_MAX, FP8_MAX, 0.0]


@pytest.mark.parametrize("tokens", [1, 3, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_product_is_that_of_the_rounded_numbers(tokens: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    x, matrix = torch.randn(tokens, 48) * 3, torch.randn(32, 48)
    added = torch.randn(32) if bias else None
    weight, scales = quantize_rows(matrix)
    rounded, row_scales = quantize_rows(x)
    exact = (rounded.double() * row_scales.double()) @ (weight.double() * scales.double()).T
    exact = exact if added is None else exact + added.double()
    given = Matrix(weight, scales, torch.zeros(32, dtype=torch.int32))
    torch.testing.assert_close(fp8_linear(x, given, added).double(), exact, rtol=1e-5, atol=1e-4)
    unrounded = x.double() @ matrix.double().T + (0 if added is None else added.double())
    assert (exact - unrounded).norm() / unrounded.norm() < 0.05


def test_cache_takes_keys_and_values_in_eight_bits() -> None:
    torch.manual_seed(0)
    pool = (torch.zeros(6, 2, 4, dtype=E4M3), torch.zeros(6, 2, 4, dtype=E4M3))
    keys, values = torch.randn(2, 2, 4), torch.full((2, 2, 4), 1e4)
    store_kv(keys, values, pool, torch.tensor([4, 1]))
    assert torch.equal(pool[0][[4, 1]].float(), cast_to_fp8(keys).float())
    assert (pool[1][[4, 1]].float() == FP8_MAX).all()
    assert all((side[[0, 2, 3, 5]].float() == 0).all() for side in pool)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_are_those_of_transformers_with_rounded_numbers(tmp_path: Path, family: str) -> None:
    path = make_model(tmp_path, family)
    outputs = own_tokens(path, quantization="fp8")
    oracle = load_reference(path)
    round_linear_layers(oracle)
    assert oracle_choices(oracle, PROMPTS, outputs) == outputs


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """transformers' cache with keys, which come with their rotary embedding, and values in eight bits."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *place: Any, **options: Any) -> Any:
        kept = [cast_to_fp8(given).to(given.dtype) for given in (keys, values)]
        return super().update(*kept, *place, **options)


def with_rounded_cache(oracle: Any) -> Callable[..., Any]:
    return lambda ids, **options: oracle(ids, past_key_values=RoundedCache(), **options)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_with_an_eight_bit_cache_are_those_of_transformers_with_one(
    tmp_path: Path, family: str
) -> None:
    path = make_model(tmp_path, family)
    outputs = own_tokens(path, kv_cache_dtype="fp8_e4m3")
    oracle = load_reference(path)
    assert oracle_choices(with_rounded_cache(oracle), PROMPTS, outputs) == outputs
    assert oracle_choices(oracle, PROMPTS, outputs) != outputs, "the rounding changes no token of these"


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_eight_bit_cache_gives_the_same_tokens_for_any_page_size_and_chunk(
    tmp_path: Path, quantization: Any
) -> None:
    path = make_model(tmp_path, "qwen3")
    found = []
    for page_size, budget in ((1, 64), (16, 64), (16, 13)):
        eight: dict[str, Any] = {"kv_cache_dtype": "fp8_e4m3", "quantization": quantization}
        found.append(own_tokens(path, page_size=page_size, budget=budget, **eight))
    assert found[0] == found[1] == found[2]


def test_eight_bit_weights_and_cache_together_stay_close_to_transformers_with_both(tmp_path: Path) -> None:
    """Not token by token: where sums differ in a last bit, activations round otherwise, and then keys do."""
    path = make_model(tmp_path, "qwen3")
    outputs = own_tokens(path, kv_cache_dtype="fp8_e4m3", quantization="fp8")
    oracle = load_reference(path)
    round_linear_layers(oracle)
    chosen = torch.tensor(oracle_choices(with_rounded_cache(oracle), PROMPTS, outputs))
    assert (chosen == torch.tensor(outputs)).float().mean() > 0.85
