"""Routing of mixture of experts: softmax and top-k against float64, ties, NaN, odd numbers of experts."""

import pytest
import torch
from kernel_device import DEVICE, combine, noise

from skiff_runtime.kernels.triton.moe.fused_topk import fused_topk

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize(
    ("size", "tokens", "renormalize"),
    combine([(8, 2), (8, 8), (60, 4), (128, 1), (128, 8), (512, 16)], [1, 7], [False, True]),
)
def test_weights_are_the_softmax_of_the_largest_logits(
    size: tuple[int, int], tokens: int, renormalize: bool
) -> None:
    experts, top_k = size
    logits = noise(tokens, 2 * experts, dtype=torch.float32, seed=tokens)[:, :experts] * 3
    weights, ids = fused_topk(logits, top_k, renormalize=renormalize)
    assert weights.shape == ids.shape == (tokens, top_k)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    top = logits.double().cpu().softmax(-1).topk(top_k)
    expected = top.values / top.values.sum(-1, keepdim=True) if renormalize else top.values
    assert torch.equal(ids.long().cpu(), top.indices)
    torch.testing.assert_close(weights.double().cpu(), expected, rtol=3e-6, atol=0)


def test_of_equal_logits_the_lower_expert_comes_first() -> None:
    rows = [
        [1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 1.0, 1.0],
        [0.0, -0.0, 0.0, -0.0, -1.0, 0.0, 0.0, 0.0],
        [5.0] * 8,
        [-float("inf")] * 4 + [-3.0, -3.0, -4.0, -3.0],
    ]
    weights, ids = fused_topk(torch.tensor(rows, device=DEVICE), 4, renormalize=True)
    assert ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 7, 6]]
    assert torch.allclose(weights.sum(-1), torch.ones(4, device=DEVICE))
    assert (weights[2] == weights[2, 0]).all()


@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, -1], ids=["quiet", "negative", "all ones"])
def test_nan_gives_weights_of_nan_and_experts_that_exist(bits: int) -> None:
    """A NaN in a padding row, or of a corrupted request, must not make a kernel read another expert's memory."""
    logits = noise(3, 12, dtype=torch.float32)
    logits.view(torch.int32)[0, 7] = bits
    logits.view(torch.int32)[2] = bits
    weights, ids = fused_topk(logits, 5, renormalize=True)
    assert weights[0].isnan().all() and weights[2].isnan().all() and not weights[1].isnan().any()
    for row in ids.tolist():
        assert len(set(row)) == 5 and all(0 <= expert < 12 for expert in row)


def test_no_tokens_and_impossible_top_k() -> None:
    weights, ids = fused_topk(noise(0, 8, dtype=torch.float32), 2, renormalize=True)
    assert weights.shape == ids.shape == (0, 2)
    for top_k in (0, 9):
        with pytest.raises(ValueError, match="top_k"):
            fused_topk(noise(1, 8, dtype=torch.float32), top_k, renormalize=True)
