"""Seeded random requests to ``/generate``: prompts that share prefixes, and all sampling parameters."""

import random
from typing import Any, Final

from tiny_tokenizer import VOCAB_SIZE

FIRST_TOKEN: Final = 5
"""Lower token ids are special tokens."""
MAX_PROMPT_TOKENS: Final = 120
MAX_ANSWER_TOKENS: Final = 96
_PREFIXES: Final = 12
_PREFIX_TOKENS: Final = 64


class RandomRequests:
    """A reproducible sequence of request bodies."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._prefixes = [self._tokens(_PREFIX_TOKENS) for _ in range(_PREFIXES)]

    def body(self) -> dict[str, Any]:
        """Return the next request body: half are greedy, half sampled with a seed, some with further parameters."""
        draw = self._random
        body: dict[str, Any] = {
            "token_ids": self._prompt(),
            "max_tokens": MAX_ANSWER_TOKENS if draw.random() < 0.75 else draw.randint(1, MAX_ANSWER_TOKENS),
            "ignore_eos": draw.random() < 0.9,
            "stream": draw.random() < 0.5,
            **(self._sampling() if draw.random() < 0.5 else {"temperature": 0}),
            **self._logits_options(),
        }
        if draw.random() < 0.4:
            body["logprobs"] = draw.randint(0, 5)
        if draw.random() < 0.1:
            body["prompt_logprobs"] = draw.randint(0, 3)
        return body

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, VOCAB_SIZE) for _ in range(count)]

    def _prompt(self) -> list[int]:
        """Draw a part of a shared prefix and a tail of its own, or no tail, or no shared prefix."""
        draw = self._random
        if draw.random() < 0.2:
            return self._tokens(draw.randint(1, MAX_PROMPT_TOKENS))
        prefix = draw.choice(self._prefixes)[: draw.choice((16, 31, 32, 48, _PREFIX_TOKENS))]
        own = 0 if draw.random() < 0.2 else draw.randint(1, MAX_PROMPT_TOKENS - len(prefix))
        return prefix + self._tokens(own)

    def _sampling(self) -> dict[str, Any]:
        draw = self._random
        options: dict[str, Any] = {"temperature": draw.uniform(0.2, 1.8), "seed": draw.randrange(1 << 40)}
        if draw.random() < 0.4:
            options["top_p"] = draw.uniform(0.5, 1.0)
        if draw.random() < 0.4:
            options["top_k"] = draw.randint(1, 50)
        if draw.random() < 0.3:
            options["min_p"] = draw.uniform(0.0, 0.2)
        return options

    def _logits_options(self) -> dict[str, Any]:
        """Draw parameters that modify logits or end answers."""
        draw = self._random
        options: dict[str, Any] = {}
        if draw.random() < 0.2:
            options["presence_penalty"] = draw.uniform(-2, 2)
        if draw.random() < 0.2:
            options["frequency_penalty"] = draw.uniform(-2, 2)
        if draw.random() < 0.2:
            options["repetition_penalty"] = draw.uniform(0.5, 1.9)
        if draw.random() < 0.2:
            options["logit_bias"] = {str(token): draw.uniform(-20, 20) for token in self._tokens(5)}
        if draw.random() < 0.2:
            options["stop_token_ids"] = self._tokens(10)
        if draw.random() < 0.1:
            options["min_tokens"] = 1
        return options
