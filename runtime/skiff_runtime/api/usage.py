"""Token counts in OpenAI's shape."""

from collections.abc import Sequence
from typing import Any

from skiff_runtime.messages import Usage


def format_usage(usage: Usage) -> dict[str, Any]:
    """The ``usage`` object of a reply; cached tokens are those that the KV cache held already."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def sum_usage(choices: Sequence[Usage], copies: int) -> Usage:
    """Of all choices of a request, ``copies`` for each prompt, in order. A prompt is counted once.

    Its cached tokens are those of the choice that found the fewest: the others found what that one had computed.
    """
    prompt = cached = 0
    for start in range(0, len(choices), copies):
        ran = [usage for usage in choices[start : start + copies] if usage.prompt_tokens]
        if ran:
            prompt += ran[0].prompt_tokens
            cached += min(usage.cached_tokens for usage in ran)
    return Usage(prompt, sum(usage.completion_tokens for usage in choices), cached)
