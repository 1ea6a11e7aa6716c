"""What is said of fields that are refused: what to do instead, and what a field of several types takes."""

from typing import Final

UNSUPPORTED_FIELDS: Final[dict[str, str]] = {
    "audio": "remove it; only text is generated",
    "best_of": "use 1; ask for several with 'n' and choose among them",
    "function_call": "remove it; use 'tools'",
    "functions": "remove it; use 'tools'",
    "metadata": "remove it; nothing is stored",
    "modalities": 'use ["text"]',
    "moderation": "remove it",
    "name": "remove it from the message; write the name into its content",
    "prediction": "remove it",
    "prompt_cache_key": "remove it; prefixes are found without it",
    "prompt_cache_options": "remove it; prefixes are found without it",
    "prompt_cache_retention": "remove it; prefixes are kept while there is room",
    "reasoning_effort": "remove it",
    "safety_identifier": "remove it; use 'user'",
    "service_tier": 'use "auto"',
    "store": "use false; nothing is stored",
    "suffix": "remove it",
    "verbosity": 'use "medium"',
    "web_search_options": "remove it; nothing is searched",
}
"""Fields that are not served yet -> what to do instead."""

EXPECTED_TYPES: Final[dict[str, str]] = {
    "content": "must be a string or a list of text parts",
    "prompt": "must be a string, a list of token ids, or a list of those",
    "stop": "must be a string or a list of strings",
}
"""Fields that take several types -> what they take."""
