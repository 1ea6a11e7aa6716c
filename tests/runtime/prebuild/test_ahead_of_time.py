"""The kernels that ahead-of-time compilation launches for a rank; nothing is compiled here."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from compiling import CompilingProcess
from tiny_models import make_model
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.kernels.constants import vocab_shard_size
from skiff_runtime.kernels.tuning import HOPPER

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

LAUNCHES = """
import json, sys
import torch, triton
from skiff_runtime.config import Config
from skiff_runtime.prebuild import ahead_of_time
from skiff_runtime.processes.resolve import resolve

def describe(given):
    return (str(given.dtype), *given.shape, *given.stride()) if isinstance(given, torch.Tensor) else given
def launch(kernel, *given, grid, warmup, **options):
    constants = json.dumps(options, sort_keys=True, default=str)
    # A number that is not specialized, such as a rank's first token, does not change what is compiled.
    unspecialized = kernel.do_not_specialize
    described = [
        type(each).__name__ if name in unspecialized else describe(each)
        for name, each in zip(kernel.arg_names, given)
    ]
    seen.add((kernel.fn.__name__, constants, str(grid), str(described)))
triton.JITFunction.run = launch

group = ahead_of_time.DetachedRank
sizes = {"max_running_requests": 17, "max_model_len": 512}
for line in sys.stdin:
    path, quantization, expert_parallel, max_loras, ranks = json.loads(line)
    found = []
    for tp, rank in ranks:
        seen = set()
        ahead_of_time.DetachedRank = lambda _rank, tp_size, device: group(rank, tp_size, device)
        config, model = resolve(
            Config(
                model=path,
                device="cpu",
                dtype="bfloat16",
                quantization=quantization,
                tp_size=tp,
                expert_parallel=expert_parallel,
                enable_lora=max_loras > 0,
                max_loras=max_loras or 1,
                **sizes,
            )
        )
        ahead_of_time.compile_ahead_of_time(config, model, 90)
        found.append(sorted(seen))
    print(json.dumps(found), flush=True)
"""

SHARDED = {"sample_shard_kernel", "max_sampling_keys_kernel", "take_sampled_tokens_kernel"}
FUSED_PRODUCTS = {"gemv_push_kernel", "receive_add_rms_norm_kernel"}
FUSED_LL_SUM = "all_reduce_add_rms_norm_kernel"
FUSED_SUMS = {FUSED_LL_SUM, "push_all_reduce_add_rms_norm_kernel"}
SUMS = {"low_latency_all_reduce_kernel", "push_all_reduce_kernel", *FUSED_SUMS, *FUSED_PRODUCTS}
"""Kernels that only ranks of several launch, to sample and to sum; FUSED_LL_SUM only two."""
CELLS = re.compile(r"\('torch\.int32', 3, (\d+), \1, 1\)")
"""The rows, columns and values that ``write_cells_kernel`` writes; nothing is compiled for their number."""
Launch = tuple[str, dict[str, Any], str, str]


def launches(
    model: Path,
    *ranks: tuple[int, int],
    quantization: str = "none",
    expert_parallel: bool = False,
    max_loras: int = 0,
) -> list[list[Launch]]:
    """Return (kernel, constants, grid, arguments) of each distinct launch, for each (number of ranks, rank)."""
    return [
        [(name, json.loads(constants), *rest) for name, constants, *rest in found]
        for found in _compiler().ask([str(model), quantization, expert_parallel, max_loras, ranks])
    ]


@cache
def _compiler() -> CompilingProcess:
    return CompilingProcess("-c", LAUNCHES)


@pytest.fixture(scope="module", autouse=True)
def _closed_compiler() -> Iterator[None]:
    yield
    _compiler().close()
    _compiler.cache_clear()


def constants(found: list[Launch], kernel: str, *names: str) -> set[tuple[Any, ...]]:
    return {tuple(given[name] for name in names) for launched, given, *_ in found if launched == kernel}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with four query heads and two KV heads, and a vocabulary of odd size."""
    return make_model(tmp_path_factory.mktemp("model"), head_dim=16)


RANKS = ((1, 0), (2, 0), (4, 0), (4, 3))


@pytest.fixture(scope="module")
def by_rank(model: Path) -> dict[tuple[int, int], list[Launch]]:
    """The launches of each of RANKS."""
    return dict(zip(RANKS, launches(model, *RANKS), strict=True))


@pytest.fixture(scope="module")
def found(by_rank: dict[tuple[int, int], list[Launch]]) -> dict[int, list[Launch]]:
    """The launches of rank 0, by the number of ranks."""
    return {tp_size: made for (tp_size, rank), made in by_rank.items() if rank == 0}


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_kernels_have_the_sizes_of_one_rank(found: dict[int, list[Launch]], tp_size: int) -> None:
    """With four ranks, each holds a copy of one KV head."""
    own = found[tp_size]
    kv_heads = max(1, 2 // tp_size)
    for kernel in ("decode_attention_kernel", "shared_prefix_attention_kernel"):
        assert constants(own, kernel, "KV", "GROUP") == {(kv_heads, 4 // tp_size // kv_heads)}, kernel
    assert constants(own, "prefill_attention_kernel", "KV", "HEADS") == {(kv_heads, 4 // tp_size)}
    hidden, attended, inner = 64, 64 // tp_size, 96 // tp_size
    assert constants(own, "gemv_kernel", "INPUTS") == {(hidden,), (attended,), (inner,)}
    if tp_size > 1:
        assert constants(own, "gemv_push_kernel", "INPUTS") == {(attended,), (inner,)}
        assert constants(own, "receive_add_rms_norm_kernel", "WIDTH") == {(hidden,)}
    assert constants(own, "gemv_silu_and_mul_kernel", "INPUTS") == {(hidden,)}
    assert constants(own, "silu_and_mul_kernel", "WIDTH") == {(inner,)}
    if tp_size > 1:
        shard = vocab_shard_size(VOCAB_SIZE, tp_size)
        assert constants(own, "sample_shard_kernel", "VOCAB", "SHARD") == {(VOCAB_SIZE, shard)}
    assert constants(own, "sample_blocks_kernel", "VOCAB") == {(VOCAB_SIZE,)}


def test_kernels_without_sharded_sizes_are_the_same_for_any_tp_size(found: dict[int, list[Launch]]) -> None:
    """The kernels that sum over the ranks and sample from shards are added, and those of an exchange for two ranks.

    Several ranks also write the tokens of filtered rows to the table, and so other numbers of cells.
    """
    names = {launch[0] for launch in found[1]}
    for tp_size, launched in found.items():
        added = SHARDED | SUMS if tp_size > 1 else set()
        variants = {(64, False, False), (64, True, False)}
        if tp_size == 2:
            added, variants = added | {"barrier_kernel"}, variants | {(64, True, True)}
        else:
            added = added - {FUSED_LL_SUM}
        assert {launch[0] for launch in launched} == names | added
        assert constants(launched, "rms_norm_kernel", "WIDTH", "ADD", "ADD_OTHER") == variants
    for kernel in ("prepare_inputs_kernel", "write_cells_kernel"):
        first, *others = (
            {
                (str(given), grid, CELLS.sub("cells", arguments))
                for name, given, grid, arguments in each
                if name == kernel
            }
            for each in found.values()
        )
        assert first and all(other == first for other in others), kernel


def test_attention_kernels_are_compiled_for_each_window(tmp_path: Path) -> None:
    """A step of a model with windows in some layers launches both variants; only full attention shares prefixes."""
    options: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 2}
    (mixed,) = launches(make_model(tmp_path / "mixed", "qwen3", **options), (1, 0))
    for kernel in ("decode_attention_kernel", "prefill_attention_kernel"):
        assert constants(mixed, kernel, "WINDOW") == {(0,), (48,)}, kernel
    found = constants(mixed, "decode_attention_kernel", "WINDOW", "HAS_PREFIXES")
    assert found == {(0, False), (0, True), (48, False)}
    (every,) = launches(make_model(tmp_path / "every", "mistral", sliding_window=48), (1, 0))
    assert constants(every, "decode_attention_kernel", "WINDOW", "HAS_PREFIXES") == {(48, False)}
    assert "shared_prefix_attention_kernel" not in {launch[0] for launch in every}


@pytest.mark.parametrize("tp_size", [2, 4])
def test_every_sum_over_ranks_is_compiled(found: dict[int, list[Launch]], tp_size: int) -> None:
    """Two-shot, too, which more than two ranks use, for messages that no step on fake tensors has."""
    own = found[tp_size]
    two_shot = {(True,)} if tp_size > 2 else set()
    assert constants(own, "push_all_reduce_kernel", "TWO_SHOT") == {(False,)} | two_shot
    unused = {FUSED_LL_SUM} if tp_size > 2 else set()
    for kernel in SUMS - unused:
        assert constants(own, kernel, "RANKS") == {(tp_size,)}
    for kernel in FUSED_SUMS - unused:
        assert constants(own, kernel, "WIDTH") == {(64,)}


def test_all_ranks_launch_the_same_kernels(by_rank: dict[tuple[int, int], list[Launch]]) -> None:
    """The vocabulary's size is odd, so the last rank's share is shorter."""
    assert by_rank[4, 3] == by_rank[4, 0]


def test_all_ranks_launch_the_same_fp8_kernels(tmp_path: Path) -> None:
    """A single rank completes no sum, so norms are part of the products behind them."""
    model = make_model(tmp_path, "qwen3")
    single, first, second = launches(model, (1, 0), (2, 0), (2, 1), quantization="fp8")
    assert first == second and first
    kernel = "add_rms_norm_fp8_gemv_kernel"
    assert constants(single, kernel, "INPUTS") == {(64,)} and not constants(first, kernel, "INPUTS")
    quantizing = {name.replace("norm_kernel", "norm_quantize_kernel") for name in FUSED_SUMS}
    assert {launch[0] for launch in first} >= quantizing | FUSED_SUMS


@pytest.mark.parametrize(
    ("quantization", "expert_parallel"),
    [
        ("none", True),
        ("fp8", False),
        pytest.param("none", False, marks=pytest.mark.matrix),
        pytest.param("fp8", True, marks=pytest.mark.matrix),
    ],
)
def test_all_ranks_launch_the_same_kernels_of_experts(
    tmp_path: Path, quantization: str, expert_parallel: bool
) -> None:
    """Only an argument for which nothing is compiled, the first expert, differs."""
    model = make_model(tmp_path, "qwen3_moe")
    first, second = launches(
        model, (2, 0), (2, 1), quantization=quantization, expert_parallel=expert_parallel
    )
    assert [launch[:3] for launch in first] == [launch[:3] for launch in second]
    for kernel in ("fused_topk_kernel", "router_topk_kernel"):
        assert constants(first, kernel, "EXPERTS", "TOP_K") == {(8, 3)}
    assert constants(first, "moe_align_block_size_kernel", "EXPERTS") == {(4 if expert_parallel else 8,)}


def test_kernels_of_adapters_are_compiled_for_every_number_of_tokens(
    model: Path, found: dict[int, list[Launch]]
) -> None:
    """A service without adapters launches none of them; one with adapters launches all others, too."""
    (own,) = launches(model, (1, 0), max_loras=3)
    names = {launch[0] for launch in own} - {launch[0] for launch in found[1]}
    assert names == {
        "add_lora_kernel",
        "expand_add_rms_norm_kernel",
        "expand_silu_and_mul_blocks_kernel",
        "expand_silu_and_mul_kernel",
        "fill_slot_kernel",
        "group_tokens_kernel",
    }
    assert constants(own, "qk_norm_rope_store_kv_kernel", "MAX_RANK") == {(0,), (16,)}
    rows = {rule.tile.rows for rule in HOPPER.lora.rules}
    assert constants(own, "add_lora_kernel", "ROWS") == {(each,) for each in rows}
    assert constants(own, "add_lora_kernel", "MAX_RANK") == {(16,)}
