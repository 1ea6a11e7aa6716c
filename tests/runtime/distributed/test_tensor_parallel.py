"""Tensor parallelism on real processes: collectives, and the tokens of models against one rank and transformers."""

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


def test_single_rank_needs_no_process_group() -> None:
    group = TensorParallelGroup.start(tp_rank=0, tp_size=1, device="cpu", run_dir=Path("/nonexistent"))
    tensor = torch.ones(2, 3)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert group.all_reduce_min(7) == 7
    assert not torch.distributed.is_initialized()


class Echo(DetachedRank):
    """A group whose other ranks all contribute this rank's tensor to a gather."""

    def _gather(self, gathered: torch.Tensor, tensor: torch.Tensor) -> None:
        gathered.copy_(tensor.repeat(self.tp_size, 1))


@pytest.mark.parametrize("tp_size", [1, 3])
def test_logits_are_written_to_a_given_buffer(tp_size: int) -> None:
    context = LayerContext(torch.float32, torch.device("cpu"), Echo(0, tp_size))
    embedding = VocabParallelEmbedding(37, 16, context)
    embedding.weight.normal_(generator=torch.Generator().manual_seed(0))
    head = OutputHead(embedding, 37, context)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
    out = head.empty_logits(8)
    logits = head(hidden, out[:5])
    assert logits.shape == (5, 37) and logits.data_ptr() == out.data_ptr()
    torch.testing.assert_close(logits, head(hidden))


def test_rank_without_peers_raises_after_timeout(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="rank 0 of 2 could not join the other ranks"):
        TensorParallelGroup.start(tp_rank=0, tp_size=2, device="cpu", run_dir=tmp_path, timeout_seconds=1)


def test_two_ranks_generate_the_tokens_of_one_rank_and_of_transformers(tmp_path: Path) -> None:
    """The models have sharded or replicated KV heads and a vocabulary of odd size; the first step samples no token."""
    kv_heads = {
        "llama": 2,
        "llama_tied": 1,
        "qwen2": 1,
        "qwen3": 2,
        "mistral": 2,
        "qwen3_moe": 1,
        "mixtral": 2,
    }
    paths = [
        str(make_model(tmp_path / family, family, seed=7, num_key_value_heads=count))
        for family, count in kv_heads.items()
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
