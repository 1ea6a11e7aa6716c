"""Log-probabilities get the bytes of their tokens, and stay with their rows when other rows are dropped."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from tiny_tokenizer import BOS_ID, EOS_ID, write_tokenizer
from tokenizers import Tokenizer

from skiff_runtime.messages import (
    NO_TOKEN,
    FinishReason,
    Flushed,
    PromptLogprobs,
    StepStats,
    StreamOpened,
    TextLogprobs,
    TextOptions,
    TokenBatch,
    TokenLogprobs,
    TokenText,
    Wire,
)
from skiff_runtime.tokenizer.detokenizer import Detokenizer
from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.decode_stream import TokenDecoder
from skiff_runtime.vocabulary.encoder import load_tokenizer

RUNNING = FinishReason.RUNNING


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, TokenDecoder]:
    directory = tmp_path_factory.mktemp("bytes")
    write_tokenizer(directory)
    decoder = read_byte_level_decoder(directory / "tokenizer.json")
    assert decoder is not None
    return load_tokenizer(directory / "tokenizer.json"), decoder


def ids(values: Sequence[int]) -> bytes:
    return np.array(values, Wire.TOKEN).tobytes()


def floats(values: Sequence[float]) -> bytes:
    return np.array(values, Wire.LOGPROB).tobytes()


def opened(uid: int, *stop: str) -> StreamOpened:
    return StreamOpened(uid=uid, prompt_tokens=4, cached_tokens=0, text=TextOptions(stop=stop))


def batch(
    rows: Sequence[tuple[int, int, FinishReason]],
    *streams: StreamOpened,
    logprobs: Sequence[TokenLogprobs] = (),
    prompts: Sequence[PromptLogprobs] = (),
) -> TokenBatch:
    return TokenBatch(
        opened=list(streams),
        uids=np.array([uid for uid, _, _ in rows], Wire.UID).tobytes(),
        tokens=ids([token for _, token, _ in rows]),
        finishes=bytes(finish for _, _, finish in rows),
        failed=[],
        stats=StepStats(),
        logprobs=list(logprobs),
        prompt_logprobs=list(prompts),
        flushed=[Flushed(uid=7, pages=3, running=1)],
    )


def test_logprobs_stay_with_their_rows_when_others_are_dropped(
    byte_level: tuple[Tokenizer, TokenDecoder],
) -> None:
    tokenizer, decoder = byte_level
    word, other = tokenizer.encode("boat pod", add_special_tokens=False).ids[:2]
    detokenizer = Detokenizer(decoder)
    detokenizer.detokenize(batch([], opened(1), opened(3)))
    logprobs = [
        TokenLogprobs(0, -0.5, ids([word, other]), floats([-0.5, -1.5])),
        TokenLogprobs(1, -9.0),
        TokenLogprobs(2, -2.0, ids([EOS_ID]), floats([-0.25])),
    ]
    rows = [(1, word, RUNNING), (2, word, RUNNING), (3, other, FinishReason.LENGTH)]
    texts, _ = detokenizer.detokenize(batch(rows, logprobs=logprobs))
    data = decoder.token_bytes
    assert np.frombuffer(texts.uids, Wire.UID).tolist() == [1, 3]
    assert texts.logprobs == [
        TextLogprobs(
            0,
            TokenText(word, data(word), -0.5),
            [TokenText(word, data(word), -0.5), TokenText(other, data(other), -1.5)],
        ),
        TextLogprobs(1, TokenText(other, data(other), -2.0), [TokenText(EOS_ID, b"<|end|>", -0.25)]),
    ]
    assert texts.flushed == [Flushed(uid=7, pages=3, running=1)]


def test_rows_after_a_stop_string_have_no_logprobs(byte_level: tuple[Tokenizer, TokenDecoder]) -> None:
    tokenizer, decoder = byte_level
    word = tokenizer.encode("boat", add_special_tokens=False).ids[0]
    detokenizer = Detokenizer(decoder)
    rows = [(1, word, RUNNING)]
    logprobs = [TokenLogprobs(0, -0.5)]
    first, stopped = detokenizer.detokenize(
        batch(rows, opened(1, tokenizer.decode([word])[-1]), logprobs=logprobs)
    )
    assert ([each.row for each in first.logprobs], stopped) == ([0], [1])
    late, _ = detokenizer.detokenize(batch(rows, logprobs=logprobs))
    assert (late.texts, late.logprobs) == ([], [])


def test_prompt_logprobs_get_the_bytes_of_their_tokens(byte_level: tuple[Tokenizer, TokenDecoder]) -> None:
    tokenizer, decoder = byte_level
    word, other = tokenizer.encode("boat pod", add_special_tokens=False).ids[:2]
    opened_prompt = PromptLogprobs(
        uid=1,
        start=0,
        top=2,
        token_ids=ids([BOS_ID, word]),
        logprobs=floats([math.nan, -1.0]),
        top_ids=ids([NO_TOKEN, NO_TOKEN, other, word]),
        top_logprobs=floats([math.nan, math.nan, -0.5, -1.0]),
    )
    unopened_prompt = PromptLogprobs(
        uid=2, start=0, top=0, token_ids=ids([word]), logprobs=floats([-1.0]), top_ids=b"", top_logprobs=b""
    )
    texts, _ = Detokenizer(decoder).detokenize(
        batch([(1, word, FinishReason.LENGTH)], opened(1), prompts=[opened_prompt, unopened_prompt])
    )
    [prompt] = texts.prompt_logprobs
    first, second = prompt.tokens
    assert (prompt.uid, prompt.start) == (1, 0)
    assert (first.row, first.chosen.data, first.top) == (-1, b"<|begin|>", [])
    assert math.isnan(first.chosen.logprob)
    data = decoder.token_bytes
    assert second == TextLogprobs(
        -1,
        TokenText(word, data(word), -1.0),
        [TokenText(other, data(other), -0.5), TokenText(word, data(word), -1.0)],
    )
