"""Token counts in OpenAI's shape."""

from typing import Any

from skiff_runtime.messages import Usage


def usage_json(usage: Usage) -> dict[str, Any]:
    """The ``usage`` object of a reply; cached tokens are those that the KV cache held already."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
