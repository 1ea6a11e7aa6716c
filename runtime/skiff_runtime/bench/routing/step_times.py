"""The time of an engine's steps on an H200, as a formula over what a step computes.

The constants are fitted to measurements of Llama-3.1-8B in bfloat16 (docs/lab/routing.md has the comparison).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step: the larger of reading the weights and the products of prompt tokens, and attention.

    ``base``: one decode step of one short row. ``row``: each decoding row. ``kv_token``: each token of the rows' contexts.
    ``prompt_token``: each prompt token's matrix products. ``context_token``: each pair of a prompt token and a token before
    it, in attention.
    """

    base: float = 3.8e-3
    row: float = 14e-6
    kv_token: float = 33e-9
    prompt_token: float = 25e-6
    context_token: float = 0.9e-9

    def decode(self, rows: int, kv_tokens: int) -> float:
        """Return the seconds of a decode step over ``rows`` whose contexts have ``kv_tokens`` in total."""
        return self.base + self.row * rows + self.kv_token * kv_tokens

    def mixed(self, rows: int, kv_tokens: int, prompt_tokens: int, pairs: int) -> float:
        """Return the seconds of a step that also computes ``prompt_tokens``, which attend to ``pairs`` tokens in all."""
        products = max(self.base, self.prompt_token * prompt_tokens)
        return products + self.row * rows + self.kv_token * kv_tokens + self.context_token * pairs

    def count_decode_steps(self, rows: int, kv_tokens: int, seconds: float, limit: int) -> int:
        """Return how many decode steps, of at most ``limit``, have begun after ``seconds``; at least one."""
        low, high = 1, limit
        while low < high:
            middle = (low + high) // 2
            if self.decode_run(rows, kv_tokens, middle) >= seconds:
                high = middle
            else:
                low = middle + 1
        return low

    def decode_run(self, rows: int, kv_tokens: int, steps: int) -> float:
        """Return the seconds of consecutive decode steps, in which each row's context grows by a token a step."""
        return steps * self.decode(rows, kv_tokens) + self.kv_token * rows * (steps * (steps - 1) // 2)
