"""Tensor parallelism on real processes: collectives, and models that answer as one rank or transformers would."""

from pathlib import Path

import numpy as np
import pytest
import torch
from rank_functions import collectives, generated
from rank_processes import on_ranks
from tiny_models import load_reference, make_model, oracle_choices
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.distributed.tensor_parallel import DetachedRank, TensorParallelGroup
from skiff_runtime.errors import StartupError
from skiff_runtime.layers.embedding import OutputHead, VocabParallelEmbedding
from skiff_runtime.layers.sharding import LayerContext

COUNT = 8


def test_collectives_of_two_ranks(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, collectives)
    assert first == second
    assert first == {
        "sum": [3.0, 3.0],
        "short": [3.0, 3.0],
        "dtype": "torch.bfloat16",
        "gathered": [[1.0, 0.0, 2.0, 0.0], [10.0, 1.0, 20.0, 1.0]],
        "placed": [[1.0, 0.0, 2.0, 0.0], [10.0, 1.0, 20.0, 1.0]],
        "minimum": 9,
    }


def test_one_rank_needs_no_process_group() -> None:
    group = TensorParallelGroup.start(rank=0, size=1, device="cpu", run_dir=Path("/nonexistent"))
    tensor = torch.ones(2, 3)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert group.minimum(7) == 7
    assert not torch.distributed.is_initialized()


class Echo(DetachedRank):
    """All other ranks send what this one does."""

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        gathered.copy_(tensor.repeat(self.size, 1))


@pytest.mark.parametrize("ranks", [1, 3])
def test_logits_are_put_where_there_is_room(ranks: int) -> None:
    placement = LayerContext(torch.float32, torch.device("cpu"), Echo(0, ranks))
    embedding = VocabParallelEmbedding(37, 16, placement)
    embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    head = OutputHead(embedding, 37, placement)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    room = head.room(8)
    logits = head(hidden, room[:5])
    assert logits.shape == (5, 37) and logits.data_ptr() == room.data_ptr()
    torch.testing.assert_close(logits, head(hidden))


def test_a_rank_that_is_alone_gives_up(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="rank 0 of 2 could not meet the others"):
        TensorParallelGroup.start(rank=0, size=2, device="cpu", run_dir=tmp_path, timeout_seconds=1)


def test_two_ranks_equal_transformers_and_one_rank(tmp_path: Path) -> None:
    """All families, KV heads divided and (one for two ranks) replicated, an odd vocabulary, a first step without a token."""
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
