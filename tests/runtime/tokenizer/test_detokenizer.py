"""Detokenizer: token batches become text batches, with one terminal row for each request and no state after it."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tiny_tokenizer import BOS_ID, EOS_ID, write_tokenizer
from tokenizers import Tokenizer

from skiff_runtime.messages import (
    NO_TOKEN,
    FinishReason,
    RequestFailed,
    StepStats,
    StreamOpened,
    TextBatch,
    TextOptions,
    TokenBatch,
    Usage,
    Wire,
)
from skiff_runtime.tokenizer.detokenizer import Detokenizer
from skiff_runtime.vocabulary.byte_level import read_byte_level_decoder
from skiff_runtime.vocabulary.encoder import load_tokenizer

Row = tuple[int, int, FinishReason]
RUNNING, STOP, LENGTH, ABORT = (
    FinishReason.RUNNING,
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory / "tokenizer.json")


@pytest.fixture
def detokenizer(directory: Path) -> Detokenizer:
    decoder = read_byte_level_decoder(directory / "tokenizer.json")
    assert decoder is not None
    return Detokenizer(decoder)


def opened(uid: int, *stop: str, skip: bool = True, include: bool = False) -> StreamOpened:
    options = TextOptions(stop=stop, skip_special_tokens=skip, include_stop_str_in_output=include)
    return StreamOpened(uid=uid, prompt_tokens=9, cached_tokens=4, text=options)


def batch(rows: list[Row], *streams: StreamOpened, failed: tuple[RequestFailed, ...] = ()) -> TokenBatch:
    uids, tokens, finishes = zip(*rows, strict=True) if rows else ((), (), ())
    return TokenBatch(
        opened=list(streams),
        uids=np.array(uids, dtype=Wire.UID).tobytes(),
        tokens=np.array(tokens, dtype=Wire.TOKEN).tobytes(),
        finishes=bytes(finishes),
        failed=list(failed),
        stats=StepStats(running=3),
    )


def rows(texts: TextBatch) -> list[tuple[int, str, FinishReason]]:
    uids = np.frombuffer(texts.uids, dtype=Wire.UID).tolist()
    assert len(uids) == len(texts.texts) == len(texts.finishes) == len(texts.tokens) // 4
    assert len(texts.usages) == sum(map(bool, texts.finishes))
    return [
        (uid, text, FinishReason(f)) for uid, text, f in zip(uids, texts.texts, texts.finishes, strict=True)
    ]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_batch_with_two_requests_yields_text_for_each(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    one, two = ids(tokenizer, "boat")[0], ids(tokenizer, "pod")[0]
    texts, stopped = detokenizer.detokenize(
        batch([(1, one, RUNNING), (2, two, LENGTH)], opened(1), opened(2))
    )
    assert rows(texts) == [(1, tokenizer.decode([one]), RUNNING), (2, tokenizer.decode([two]), LENGTH)]
    assert texts.usages == [Usage(prompt_tokens=9, completion_tokens=1, cached_tokens=4)]
    assert texts.stats == StepStats(running=3)
    assert (stopped, len(detokenizer)) == ([], 1)


def test_end_token_is_counted_but_not_shown(detokenizer: Detokenizer) -> None:
    texts, _ = detokenizer.detokenize(
        batch([(1, EOS_ID, STOP), (2, EOS_ID, STOP)], opened(1), opened(2, skip=False))
    )
    assert rows(texts) == [(1, "", STOP), (2, "", STOP)]
    assert [usage.completion_tokens for usage in texts.usages] == [1, 1]


def test_special_tokens_are_shown_unless_skipped(detokenizer: Detokenizer) -> None:
    """Tool-call parsers need them."""
    detokenizer.detokenize(batch([], opened(1), opened(2, skip=False)))
    texts, _ = detokenizer.detokenize(batch([(1, BOS_ID, RUNNING), (2, BOS_ID, RUNNING)]))
    assert rows(texts) == [(1, "", RUNNING), (2, "<|begin|>", RUNNING)]


def test_include_stop_str_shows_stop_tokens_and_strings(
    detokenizer: Detokenizer, tokenizer: Tokenizer
) -> None:
    word = ids(tokenizer, "boat")[0]
    text = tokenizer.decode([word])
    streams = (
        opened(1, include=True),
        opened(2, text[-1], include=True),
        opened(3, text + "!", include=True),
    )
    texts, stopped = detokenizer.detokenize(
        batch([(1, word, STOP), (2, word, RUNNING), (3, word, RUNNING)], *streams)
    )
    assert rows(texts) == [(1, text, STOP), (2, text, STOP), (3, text, RUNNING)]
    assert [usage.stop_string for usage in texts.usages] == [None, text[-1]]
    assert stopped == [2]
    texts, _ = detokenizer.detokenize(batch([(3, EOS_ID, STOP)]))
    assert rows(texts) == [(3, "", STOP)]


def test_stop_token_is_not_shown(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    """``stop_token_ids`` may name any token, not only special ones."""
    word = ids(tokenizer, "boat")[0]
    texts, _ = detokenizer.detokenize(batch([(1, word, STOP)], opened(1)))
    assert rows(texts) == [(1, "", STOP)]


def test_held_back_bytes_are_flushed_at_the_end(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    first, *_ = ids(tokenizer, "😀")
    texts, _ = detokenizer.detokenize(batch([(1, first, RUNNING)], opened(1)))
    assert rows(texts) == [(1, "", RUNNING)]
    texts, _ = detokenizer.detokenize(batch([(1, EOS_ID, STOP)]))
    assert rows(texts) == [(1, "\ufffd", STOP)]


def test_stop_string_ends_its_request_once(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    tokens = ids(tokenizer, "one STOP two three")
    shown, num_ends, aborted = "", 0, []
    for index, token in enumerate(tokens):
        texts, stopped = detokenizer.detokenize(
            batch(
                [(1, token, RUNNING), (2, token, RUNNING)],
                *([opened(1, "STOP"), opened(2)] if index == 0 else []),
            )
        )
        mine = [(text, finish) for uid, text, finish in rows(texts) if uid == 1]
        shown += "".join(text for text, _ in mine)
        num_ends += sum(finish == STOP for _, finish in mine)
        aborted += stopped
    assert (shown, num_ends, aborted) == ("one ", 1, [1])
    assert len(detokenizer) == 2
    texts, _ = detokenizer.detokenize(batch([(1, NO_TOKEN, STOP), (2, NO_TOKEN, ABORT)]))
    assert rows(texts) == [(2, "", ABORT)]
    assert len(detokenizer) == 0


def test_stop_string_in_the_last_token_wins_over_length(
    detokenizer: Detokenizer, tokenizer: Tokenizer
) -> None:
    token = ids(tokenizer, "boat")[0]
    text = tokenizer.decode([token])
    texts, stopped = detokenizer.detokenize(batch([(1, token, LENGTH)], opened(1, text[-1])))
    assert rows(texts) == [(1, text[:-1], STOP)]
    assert texts.usages == [Usage(9, 1, 4, stop_string=text[-1])]
    assert (stopped, len(detokenizer)) == ([], 0)


def test_text_held_back_for_a_stop_string_is_shown_at_the_end(
    detokenizer: Detokenizer, tokenizer: Tokenizer
) -> None:
    token = ids(tokenizer, "boat")[0]
    text = tokenizer.decode([token])
    texts, _ = detokenizer.detokenize(batch([(1, token, RUNNING)], opened(1, text + "!")))
    assert rows(texts) == [(1, "", RUNNING)]
    texts, _ = detokenizer.detokenize(batch([(1, EOS_ID, STOP)]))
    assert rows(texts) == [(1, text, STOP)]


def test_request_that_never_ran_gets_a_terminal_row(detokenizer: Detokenizer) -> None:
    texts, _ = detokenizer.detokenize(batch([(5, NO_TOKEN, ABORT)]))
    assert rows(texts) == [(5, "", ABORT)]
    assert texts.usages == [Usage(0, 0, 0)]


def test_failed_requests_and_late_rows_leave_no_state(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    word = ids(tokenizer, "boat")[0]
    detokenizer.detokenize(batch([(1, word, RUNNING)], opened(1)))
    failure = RequestFailed(uid=1, status=400, kind="invalid_request_error", message="too long")
    texts, _ = detokenizer.detokenize(batch([(3, word, RUNNING)], failed=(failure,)))
    assert rows(texts) == []
    assert (texts.failed, len(detokenizer)) == ([failure], 0)


def test_preempted_request_keeps_its_held_back_bytes(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    """A request that was preempted is opened again; its half character is not lost."""
    first, *rest = ids(tokenizer, "😀")
    detokenizer.detokenize(batch([(1, first, RUNNING)], opened(1)))
    shown = ""
    for token in rest:
        texts, _ = detokenizer.detokenize(batch([(1, token, RUNNING)], opened(1)))
        shown += "".join(texts.texts)
    assert shown == "😀"


def test_stop_string_before_min_tokens_is_ignored(detokenizer: Detokenizer, tokenizer: Tokenizer) -> None:
    token = ids(tokenizer, "boat")[0]
    text = tokenizer.decode([token])
    stream = replace(opened(1, text), min_tokens=2)
    results = []
    for index in range(3):
        texts, stopped = detokenizer.detokenize(batch([(1, token, RUNNING)], *([] if index else [stream])))
        results.append((rows(texts), stopped))
    assert results[:2] == [([(1, text, RUNNING)], [])] * 2
    assert results[2] == ([(1, "", STOP)], [1])
