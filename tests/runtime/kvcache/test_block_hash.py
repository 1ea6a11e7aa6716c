"""Names of blocks: the same in every process and on every machine, different wherever the content before them differs."""

import json

import numpy as np
import pytest

from skiff_runtime.kvcache.block_hash import hash_blocks
from skiff_runtime.prompt_blocks import MAX_PROMPT_BLOCKS, PROMPT_BLOCK_BYTES, hash_body, hash_prompt

TOKENS = np.arange(8, dtype=np.int32)


def test_kv_blocks_have_fixed_names() -> None:
    assert hash_blocks(TOKENS, 4, parent=None) == [2732996829369619577, 7777565900991519117]


def test_name_depends_on_all_that_comes_before() -> None:
    first, second = hash_blocks(TOKENS, 4, parent=None)
    assert hash_blocks(TOKENS[4:], 4, parent=first) == [second]
    assert second not in hash_blocks(TOKENS[4:], 4, parent=None)
    assert not {first, second} & set(hash_blocks(TOKENS, 4, parent=None, salt=b"other"))


def names(body: dict[str, object], namespace: bytes = b"") -> list[int]:
    blocks = hash_body(json.dumps(body).encode(), namespace)
    assert blocks is not None
    hashes: list[int] = blocks.names()
    return hashes


def chat(*texts: str, **fields: object) -> dict[str, object]:
    return {**fields, "messages": [{"role": "user", "content": text} for text in texts]}


def test_prompt_blocks_have_fixed_names() -> None:
    blocks = hash_prompt(b"x" * (2 * PROMPT_BLOCK_BYTES + 7), b"")
    assert blocks.names() == [4647292325349206857, 18075703240426592285]
    assert blocks.text_bytes == 2 * PROMPT_BLOCK_BYTES + 7


def test_next_turn_of_a_conversation_begins_with_the_blocks_of_the_last() -> None:
    first = names(chat("a" * 3000, model="m", temperature=0.5))
    second = names(chat("a" * 3000, "b" * 3000, model="m", stream=True))
    assert len(first) == 2 and second[:2] == first and len(second) == 5


@pytest.mark.parametrize(
    "changed", [chat("b" + "a" * 2999), chat("a" * 3000, tools=[{"name": "f"}]), chat("a" * 3000, system="s")]
)
def test_other_beginning_has_other_blocks(changed: dict[str, object]) -> None:
    assert not set(names(chat("a" * 3000))) & set(names(changed))


def test_namespaces_are_apart() -> None:
    assert not set(names(chat("a" * 3000))) & set(names(chat("a" * 3000), b"salt"))


@pytest.mark.parametrize("field", ["prompt", "input", "instructions", "text", "input_ids", "system"])
def test_prompts_of_every_api_are_read(field: str) -> None:
    assert len(names({field: "x" * 5000})) == 4


@pytest.mark.parametrize("body", [b'{"temperature": NaN}', b"[1]", b"[" * 100_000])
def test_body_that_is_no_json_has_no_blocks(body: bytes) -> None:
    assert hash_body(body, b"") is None


def test_number_of_blocks_is_bounded() -> None:
    assert len(names(chat("a" * (MAX_PROMPT_BLOCKS + 5) * PROMPT_BLOCK_BYTES))) == MAX_PROMPT_BLOCKS
