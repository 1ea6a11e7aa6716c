"""The tensor-parallel group alone, and shards of the vocabulary on threads as ranks.

``tests/gpu/test_tensor_parallel.py`` has the tests with several processes.
"""

from pathlib import Path

import pytest
import torch
from thread_ranks import on_threads

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.errors import StartupError
from skiff_runtime.layers.embedding import OutputHead, VocabParallelEmbedding
from skiff_runtime.layers.sharding import LayerContext


def test_single_rank_needs_no_process_group() -> None:
    group = TensorParallelGroup.start(
        tp_rank=0, tp_size=1, device="cpu", run_dir=Path("/nonexistent"), timeout_seconds=1
    )
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

    assert torch.equal(torch.cat(list(on_threads(tp_size, exchange))), whole)


def test_rank_without_peers_raises_after_timeout(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="rank 0 of 2 could not join the other ranks"):
        TensorParallelGroup.start(tp_rank=0, tp_size=2, device="cpu", run_dir=tmp_path, timeout_seconds=1)
