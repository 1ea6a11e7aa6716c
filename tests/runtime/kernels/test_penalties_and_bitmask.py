"""The kernels of penalties and token bitmasks against their definitions: in Triton's interpreter, or on a GPU."""

from typing import Final

import pytest
import torch
from kernel_device import DEVICE, poison
from numpy.random import Generator, default_rng
from reference_logits_processors import process_row

from skiff_runtime.kernels.triton.sampling import penalties, token_bitmask
from skiff_runtime.messages import SamplingSpec

PENALTIES: Final = [(1.3, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, -0.7), (0.6, -1.0, 2.0), (2.0, 0.3, 0.1)]
"""Repetition, presence, frequency."""
SLOTS: Final = 9


def make_logits(random: Generator, count: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a poisoned buffer and logits [count, vocab] in it, with space behind each row."""
    buffer = poison(torch.empty(count, vocab + 5))
    buffer[:, :vocab] = torch.from_numpy(random.standard_normal((count, vocab)) * 4)
    buffer = buffer.to(DEVICE)
    return buffer, buffer[:, :vocab]


@pytest.mark.parametrize("vocab", [7, 1003])
@pytest.mark.parametrize("longest", [40, 3 * penalties.BLOCK * penalties.PROGRAMS_OF_ROW // 2])
def test_penalties_equal_the_definition(vocab: int, longest: int) -> None:
    """Texts have few or many different tokens, some are a prompt alone; slots and rows are in any order."""
    random, count = default_rng([vocab, longest]), len(PENALTIES)
    slots, rows = (random.permutation(SLOTS)[:count] for _ in range(2))
    ends = random.integers(1, longest, count)
    ends[:2] = longest, 1
    prompt_lens = [int(random.integers(1, end + 1)) for end in ends]
    texts = [random.integers(0, vocab, end).tolist() for end in ends]
    tokens = poison(torch.empty((SLOTS, longest + 3), dtype=torch.int32))
    prompt_lens_by_slot, penalties_by_slot = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS, 3)
    for slot, text, prompt_len, values in zip(slots, texts, prompt_lens, PENALTIES, strict=True):
        tokens[slot, : len(text)] = torch.tensor(text)
        prompt_lens_by_slot[slot], penalties_by_slot[slot] = prompt_len, torch.tensor(values)
    buffer, logits = make_logits(random, SLOTS, vocab)
    before = buffer.cpu().clone()
    by_row = (torch.from_numpy(each.astype("int32")).to(DEVICE) for each in (slots, ends))
    by_slot = (each.to(DEVICE) for each in (tokens, prompt_lens_by_slot, penalties_by_slot))
    penalties.apply_penalties(logits, torch.from_numpy(rows).to(DEVICE), *by_row, *by_slot)
    after = buffer.cpu()
    for row, text, prompt_len, values in zip(rows, texts, prompt_lens, PENALTIES, strict=True):
        repetition, presence, frequency = values
        sampling = SamplingSpec(
            max_tokens=1,
            seed=0,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        expected = process_row(
            before[row, :vocab], text[:prompt_len], text[prompt_len:], sampling, end_tokens=(), masked=0.0
        )
        torch.testing.assert_close(after[row, :vocab].double(), expected, rtol=1e-5, atol=1e-4)
        before[row, :vocab] = after[row, :vocab]
    assert torch.equal(after.nan_to_num(1234.0), before.nan_to_num(1234.0)), "other rows do not change"


@pytest.mark.parametrize("vocab", [31, 32, token_bitmask.BLOCK + 70])
def test_bitmask_masks_the_tokens_whose_bit_is_zero(vocab: int) -> None:
    random = default_rng(vocab)
    rows, words = torch.tensor([4, 0, 5]), -(-vocab // 32)
    masks = torch.from_numpy(random.integers(-(2**31), 2**31, (3, words)).astype("int32"))
    masks[1] = -1
    buffer, logits = make_logits(random, 6, vocab)
    expected = buffer.cpu().clone()
    for row, mask in zip(rows, masks.tolist(), strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    token_bitmask.apply_token_bitmask(logits, rows.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(buffer.cpu().nan_to_num(1234.0), expected.nan_to_num(1234.0))
