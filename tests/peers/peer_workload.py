"""Runs a workload of ``skiff bench offline --dump-workload`` on another engine, and reports the time of each round."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

WARM_UP_PROMPT = [1, 2, 3]
WARM_UP_TOKENS = 16
MISSING_TOKENS = 1
"""Number of tokens that an engine's result may lack: Mini-SGLang leaves out the last token of an output."""

Generate = Callable[[list[list[int]], list[int]], list[int]]
"""Completes prompts of token ids with outputs of the given lengths, and returns the lengths of the results."""


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A prompt of token ids, and the number of tokens to generate."""

    prompt: list[int]
    output_tokens: int


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the arguments that all peers have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", help="directory of make_model_dir.py")
    parser.add_argument(
        "workload", type=Path, nargs="+", help="file of `skiff bench offline --dump-workload`"
    )
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--max-running-requests", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.6)
    return parser


def read_rounds(path: Path) -> list[list[PeerRequest]]:
    """Return the requests of each round of a workload file."""
    rounds = json.loads(path.read_bytes())["rounds"]
    return [[PeerRequest(each["prompt_token_ids"], each["output_tokens"]) for each in one] for one in rounds]


def run_rounds(engine: str, rounds: Sequence[Sequence[PeerRequest]], generate: Generate) -> None:
    """Run all rounds, and print a JSON object for each. As with Skiff, the first of several is a warm-up.

    For a round of one request, ``decode_ms`` is the time of a decode step: the duration without that of a request for
    one token, divided by the other tokens.
    """
    generate([WARM_UP_PROMPT], [WARM_UP_TOKENS])
    for number, requests in enumerate(rounds, 1):
        result: dict[str, object] = {"engine": engine, "round": number, "requests": len(requests)}
        first_token_seconds = None
        if len(requests) == 1 and requests[0].output_tokens > 1:
            # The reversed prompt has the same length, and shares no prefix that a cache could find in the next run.
            first_token_seconds = _time(generate, [PeerRequest(requests[0].prompt[::-1], 1)])
        seconds = _time(generate, requests)
        output_tokens = sum(each.output_tokens for each in requests)
        result |= {
            "seconds": seconds,
            "prompt_tokens": sum(len(each.prompt) for each in requests),
            "output_tokens": output_tokens,
            "output_tokens_per_second": output_tokens / seconds,
        }
        if first_token_seconds is not None:
            result["decode_ms"] = 1e3 * (seconds - first_token_seconds) / (output_tokens - 1)
        print(json.dumps(result), flush=True)


def _time(generate: Generate, requests: Sequence[PeerRequest]) -> float:
    """Return the seconds that the requests take. Raises RuntimeError if an output is too short."""
    started = time.perf_counter()
    lengths = generate([each.prompt for each in requests], [each.output_tokens for each in requests])
    seconds = time.perf_counter() - started
    for each, length in zip(requests, lengths, strict=True):
        if not each.output_tokens - MISSING_TOKENS <= length <= each.output_tokens:
            raise RuntimeError(f"an output has {length} tokens instead of {each.output_tokens}")
    return seconds
