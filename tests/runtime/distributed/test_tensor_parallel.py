"""The tensor-parallel group without other ranks. ``tests/gpu/test_tensor_parallel.py`` has the tests with several."""

from pathlib import Path

import pytest
import torch

from skiff_runtime.distributed.tensor_parallel import DetachedRank, TensorParallelGroup
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
