"""Kernels for penalties and masks of grammars, against their definitions: in Triton's interpreter, or on a GPU."""

from typing import Final

import pytest
import torch
from kernel_device import DEVICE, poison
from numpy.random import Generator, default_rng
from reference_logits_processors import edited_row

from skiff_runtime.kernels.triton.sampling import penalties
from skiff_runtime.kernels.triton.sampling import token_bitmask as bitmask
from skiff_runtime.messages import SamplingSpec

ASKED: Final = [(1.3, 0.0, 0.0), (1.0, 1.5, 0.0), (1.0, 0.0, -0.7), (0.6, -1.0, 2.0), (2.0, 0.3, 0.1)]
"""Repetition, presence, frequency."""
SLOTS: Final = 9


def padded_rows(random: Generator, count: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole of a buffer whose rows are longer than what is in them, and logits [count, vocab] there."""
    room = poison(torch.empty(count, vocab + 5))
    room[:, :vocab] = torch.from_numpy(random.standard_normal((count, vocab)) * 4)
    room = room.to(DEVICE)
    return room, room[:, :vocab]


@pytest.mark.parametrize("vocab", [7, 1003])
@pytest.mark.parametrize("longest", [40, 3 * penalties.BLOCK * penalties.PARTS // 2])
def test_penalties_are_those_of_the_definition(vocab: int, longest: int) -> None:
    """Texts with few and with many different tokens, some of a prompt alone, in slots and rows of any order."""
    random = default_rng([vocab, longest])
    slots, rows = (random.permutation(SLOTS)[: len(ASKED)] for _ in range(2))
    ends = random.integers(1, longest, len(ASKED))
    ends[:2] = longest, 1
    prompts = [int(random.integers(1, end + 1)) for end in ends]
    texts = [random.integers(0, vocab, end).tolist() for end in ends]
    table = poison(torch.empty((SLOTS, longest + 3), dtype=torch.int32))
    by_slot, asked = torch.zeros(SLOTS, dtype=torch.int64), torch.zeros(SLOTS, 3)
    for slot, text, prompt, wishes in zip(slots, texts, prompts, ASKED, strict=True):
        table[slot, : len(text)] = torch.tensor(text)
        by_slot[slot], asked[slot] = prompt, torch.tensor(wishes)
    room, logits = padded_rows(random, SLOTS, vocab)
    before = room.cpu().clone()
    narrow = (torch.from_numpy(each.astype("int32")).to(DEVICE) for each in (slots, ends))
    where = torch.from_numpy(rows).to(DEVICE)
    penalties.apply_penalties(logits, where, *narrow, *(each.to(DEVICE) for each in (table, by_slot, asked)))
    after = room.cpu()
    for row, text, prompt, (repetition, presence, frequency) in zip(rows, texts, prompts, ASKED, strict=True):
        sampling = SamplingSpec(
            max_tokens=1,
            seed=0,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        expected = edited_row(
            before[row, :vocab], text[:prompt], text[prompt:], sampling, ends=(), banned=0.0
        )
        torch.testing.assert_close(after[row, :vocab].double(), expected, rtol=1e-5, atol=1e-4)
        before[row, :vocab] = after[row, :vocab]
    assert torch.equal(after.nan_to_num(1234.0), before.nan_to_num(1234.0)), (
        "rows that ask for nothing stay as they are"
    )


@pytest.mark.parametrize("vocab", [31, 32, bitmask.BLOCK + 70])
def test_masks_admit_what_their_bits_say(vocab: int) -> None:
    random = default_rng(vocab)
    rows, words = torch.tensor([4, 0, 5]), -(-vocab // 32)
    masks = torch.from_numpy(random.integers(-(2**31), 2**31, (3, words)).astype("int32"))
    masks[1] = -1
    room, logits = padded_rows(random, 6, vocab)
    expected = room.cpu().clone()
    for row, mask in zip(rows, masks.tolist(), strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    bitmask.apply_token_bitmask(logits, rows.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(room.cpu().nan_to_num(1234.0), expected.nan_to_num(1234.0))
