"""Tensor parallelism on real processes: collectives, and the tokens of models against one rank and transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rank_functions import collectives, generated, sampled_with_every_parameter
from rank_processes import on_ranks
from thread_ranks import on_threads
from tiny_models import load_reference, make_model, oracle_choices
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.errors import StartupError
from skiff_runtime.layers.embedding import OutputHead, VocabParallelEmbedding
from skiff_runtime.layers.sharding import LayerContext

COUNT = 8


def test_collectives_of_two_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, collectives)
    assert first.pop("exchanged") == [[1.0, 0.0, 2.0, 0.0]]
    assert second.pop("exchanged") == [[10.0, 1.0, 20.0, 1.0]]
    assert first == second
    assert first == {
        "sum": [3.0, 3.0],
        "short": [3.0, 3.0],
        "dtype": "torch.bfloat16",
        "gathered": [[1.0, 0.0, 2.0, 0.0], [10.0, 1.0, 20.0, 1.0]],
        "maximum": [1, 0, -(1 << 63)],
        "minimum": 9,
    }


def test_single_rank_needs_no_process_group() -> None:
    group = TensorParallelGroup.start(tp_rank=0, tp_size=1, device="cpu", run_dir=Path("/nonexistent"))
    tensor = torch.ones(2, 3)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert group.all_to_all(tensor) is tensor
    assert group.all_reduce_max(tensor) is tensor
    assert group.all_reduce_min(7) == 7
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("tp_size", [1, 2, 3, 8, 40])
def test_gathered_shards_of_the_head_are_the_logits(tp_size: int) -> None:
    """Also where the vocabulary is not divisible, so that ranks hold padding, or nothing else; in a buffer or not."""
    generator = torch.Generator().manual_seed(0)
    weight, hidden = torch.randn(37, 16, generator=generator), torch.randn(5, 16, generator=generator)

    def compute(group: TensorParallelGroup) -> tuple[VocabShard, torch.Tensor]:
        embedding = VocabParallelEmbedding(37, 16, LayerContext(torch.float32, torch.device("cpu"), group))
        for shard in embedding.weight_shards("weight"):
            shard.target.copy_(weight[shard.start : shard.stop])
        head = OutputHead(embedding)
        out = head.empty_logits(8)
        logits = head(hidden, out[:5])
        assert logits.shape == (5, head.shard.size) and logits.data_ptr() == out.data_ptr()
        torch.testing.assert_close(logits, head(hidden))
        assert torch.equal(embedding(torch.arange(37)), weight)
        return head.shard, head.shard.gather(logits)

    results = on_threads(tp_size, compute)
    for shard, gathered in results:
        assert gathered.shape == (5, 37) and torch.equal(gathered, results[0][1])
        torch.testing.assert_close(gathered, hidden @ weight.T)
        assert shard.start <= shard.stop <= 37 and shard.stop - shard.start <= shard.size
    tokens = [range(shard.start, shard.stop) for shard, _ in results]
    assert [token for part in tokens for token in part] == list(range(37))


@pytest.mark.parametrize("tp_size", [1, 2, 3, 8])
def test_exchanged_rows_are_whole(tp_size: int) -> None:
    """Rank i gets rows i * N and on, of all ranks' columns without the padding."""
    whole = torch.arange(tp_size * 3 * 37).view(tp_size * 3, 37)

    def exchange(group: TensorParallelGroup) -> torch.Tensor:
        shard = VocabShard(group, 37)
        own = torch.full((len(whole), shard.size), -1)
        own[:, : shard.stop - shard.start] = whole[:, shard.start : shard.stop]
        return shard.exchange_rows(own)

    assert torch.equal(torch.cat(on_threads(tp_size, exchange)), whole)


def test_rank_without_peers_raises_after_timeout(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="rank 0 of 2 could not join the other ranks"):
        TensorParallelGroup.start(tp_rank=0, tp_size=2, device="cpu", run_dir=tmp_path, timeout_seconds=1)


def test_two_ranks_generate_the_tokens_of_one_rank_and_of_transformers(tmp_path: Path) -> None:
    """The models have sharded or replicated KV heads and a vocabulary of odd size; the first step samples no token."""
    paths = [
        str(make_model(tmp_path / family, family, seed=7, num_key_value_heads=kv_heads))
        for family, kv_heads in (("llama", 2), ("llama_tied", 1), ("qwen2", 1), ("qwen3", 2), ("mistral", 2))
    ]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCAB_SIZE, length).tolist() for length in (90, 1, 5, 16, 33, 70, 12)]
    arguments = (paths, prompts, COUNT, 16)
    first, second = on_ranks(2, tmp_path, generated, *arguments)
    assert first == second
    alone = generated(TensorParallelGroup(), *arguments)
    assert first == alone
    for path, greedy in zip(paths, first[::2], strict=True):
        assert greedy == oracle_choices(load_reference(Path(path)), prompts, greedy)


@pytest.mark.parametrize("exchange_min_rows", [1, 1000], ids=["divided", "gathered"])
@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_sample_with_every_parameter_like_one_rank(
    tmp_path: Path, tp_size: int, exchange_min_rows: int
) -> None:
    """Greedy rows and draws, filters, processors, grammars and log-probabilities stand beside each other."""
    path = str(make_model(tmp_path / "model", "qwen3", seed=11, num_key_value_heads=2))
    arguments = (path, 12, exchange_min_rows, {})
    found = on_ranks(tp_size, tmp_path, sampled_with_every_parameter, *arguments)
    assert all(each == found[0] for each in found)
    alone = sampled_with_every_parameter(TensorParallelGroup(), *arguments)
    assert found[0]["tokens"] == alone["tokens"]
    assert found[0]["logprob_rows"] == alone["logprob_rows"]
    for sharded, whole in zip(
        found[0]["logprobs"] + [each[2] for each in found[0]["prompts"]],
        alone["logprobs"] + [each[2] for each in alone["prompts"]],
        strict=True,
    ):
        assert sharded[0] == whole[0]
        for got, wanted in zip(sharded[1:], whole[1:], strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-4)
