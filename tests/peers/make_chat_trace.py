"""Makes a trace of chats in the format of Alibaba's published one (``qwen_traceA_blksz_16.jsonl``), for where that is not at hand.

python tests/peers/make_chat_trace.py TRACE.jsonl --requests 1000 --seed 0

Each line has chat_id, parent_chat_id, timestamp, input_length, output_length, type, turn and hash_ids of 16-token blocks.
A prompt is the whole conversation: the last prompt, its answer, and something new. Requests arrive as a Poisson
process; one in two continues a conversation whose last request is at least ten seconds old, all others begin one. New
text and answers have lengths of log-normal distributions; one first message in six is long, as if it quoted a
document. ``skiff bench serve --dataset-name trace`` replays it, and scales it to another rate by ``--request-rate``.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

BLOCK_TOKENS: Final = 16
REQUESTS_PER_SECOND: Final = 2.6
CONTINUED: Final = 0.5
"""The share of requests that continue a conversation, where one waits."""
PAUSE_SECONDS: Final = 10.0
SYSTEM_TOKENS: Final = (64, 160, 320, 512)
"""The lengths of the system prompts. Every conversation begins with one of these prompts."""
FIRST, DOCUMENT, NEXT, ANSWER = (200, 0.9), (3500, 0.6), (120, 0.9), (350, 0.7)
"""Median and sigma of log-normal lengths, in tokens."""
DOCUMENT_SHARE: Final = 1 / 6
MAX_INPUT, MAX_OUTPUT = 12_000, 2_000


@dataclass
class Chat:
    """A conversation: how often it was continued, its last request, and the tokens and whole blocks of its history."""

    system: int
    turn: int = 0
    last_id: int = -1
    last_at: float = 0.0
    tokens: int = 0
    blocks: list[int] = field(default_factory=list)


class BlockNumbers:
    """Numbers for blocks that no prompt has had."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        """Return ``count`` new numbers."""
        self._next += count
        return list(range(self._next - count, self._next))


def make_trace(requests: int, seed: int) -> list[dict[str, object]]:
    """Return the lines of a trace of ``requests`` requests."""
    random = np.random.default_rng(seed)
    numbers = BlockNumbers()
    systems = [numbers.take(tokens // BLOCK_TOKENS) for tokens in SYSTEM_TOKENS]
    chats: list[Chat] = []
    lines: list[dict[str, object]] = []
    now = 0.0

    def draw(median: float, sigma: float) -> int:
        return max(1, int(random.lognormal(np.log(median), sigma)))

    for chat_id in range(requests):
        waiting = [each for each in chats if now - each.last_at >= PAUSE_SECONDS]
        if waiting and random.random() < CONTINUED:
            chat = waiting[int(random.integers(len(waiting)))]
            added = draw(*NEXT)
        else:
            system = int(random.integers(len(systems)))
            chat = Chat(system, tokens=SYSTEM_TOKENS[system], blocks=list(systems[system]))
            chats.append(chat)
            added = draw(*(DOCUMENT if random.random() < DOCUMENT_SHARE else FIRST))
        length, answer = chat.tokens + added, min(draw(*ANSWER), MAX_OUTPUT)
        if length > MAX_INPUT:  # such a conversation has ended
            chats.remove(chat)
            length = MAX_INPUT
        whole = length // BLOCK_TOKENS
        chat.blocks = (chat.blocks + numbers.take(max(0, whole - len(chat.blocks))))[:whole]
        chat.turn += 1
        lines.append(
            {
                "chat_id": chat_id,
                "parent_chat_id": chat.last_id,
                "timestamp": round(now, 3),
                "input_length": length,
                "output_length": answer,
                "type": "text",
                "turn": chat.turn,
                # The last block is not whole, and the next prompt has another one in its place.
                "hash_ids": chat.blocks + numbers.take(int(length % BLOCK_TOKENS > 0)),
            }
        )
        chat.tokens, chat.last_id, chat.last_at = length + answer, chat_id, now
        now += float(random.exponential(1 / REQUESTS_PER_SECOND))
    return lines


def count_reused(lines: list[dict[str, object]]) -> float:
    """Return the share of the prompts' blocks that an earlier prompt has begun with as well."""
    seen: set[int] = set()
    reused = total = 0
    for line in lines:
        ids = line["hash_ids"]
        assert isinstance(ids, list)
        reused += next((index for index, each in enumerate(ids) if each not in seen), len(ids))
        total += len(ids)
        seen.update(ids)
    return reused / total


def main() -> None:
    """Write the trace, and print what it is like."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    lines = make_trace(arguments.requests, arguments.seed)
    arguments.path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    for name in ("input_length", "output_length", "turn"):
        values = np.array([each[name] for each in lines], dtype=np.int64)
        points = ", ".join(f"p{point} {np.percentile(values, point):.0f}" for point in (50, 90, 99))
        print(f"{name}: mean {values.mean():.0f}, {points}")
    print(f"{lines[-1]['timestamp']} s; {count_reused(lines):.1%} of the blocks reused")


if __name__ == "__main__":
    main()
