"""Grammar matchers: advance answers token by token under their grammars and fill their token bitmasks, by xgrammar.

This module knows neither steps nor devices; ``engine.grammar_masks`` does, and calls it on threads of its own.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import xgrammar

from skiff_runtime import log
from skiff_runtime.step import Int32

MIN_BATCHED_MASKS: Final = 4
"""Fewer masks are filled one by one: waking the threads would take longer than the work."""


class GrammarMatcher:
    """One answer under one grammar, and the bitmask of the tokens that may come next.

    A matcher is in one of three states. ``is_active``: the bitmask constrains the next token. ``is_stuck``: no token
    may come next, or one came that the grammar rejects, so the request must end. Neither: the grammar ended with its
    answer, and tokens after it are unconstrained. (With overlap scheduling, a step may still compute such a token.)
    """

    def __init__(self, grammar: xgrammar.CompiledGrammar, mask: Int32) -> None:
        """``mask`` int32[words] is filled in place each time the answer advances."""
        self.matcher = xgrammar.GrammarMatcher(grammar)
        self._mask = mask.reshape(1, -1)
        self.is_active = True
        self.is_stuck = False

    def accept(self, tokens: Iterable[int]) -> None:
        """Advance by ``tokens``, then fill the mask for the token after them."""
        for token in tokens:
            self.update_after_token(token, self.matcher.accept_token(token))
            if not self.is_active:
                return
        self.fill()

    def update_after_token(self, token: int, accepted: bool) -> None:
        """Update the state after ``matcher`` accepted or rejected ``token``."""
        if not accepted:
            self._fail(f"the grammar does not accept token {token}")
        elif self.matcher.is_terminated():
            self.is_active = False

    def fill(self) -> None:
        """Fill the mask for the next token."""
        try:
            self.matcher.fill_next_token_bitmask(self._mask)
        except RuntimeError as error:
            self._fail(str(error))
        else:
            self.update_after_fill()

    def update_after_fill(self) -> None:
        """Update the state after the mask was filled: the answer is stuck if the mask allows no token."""
        if not self._mask.any():
            self.is_active, self.is_stuck = False, True

    def _fail(self, reason: str) -> None:
        log.error("grammar_failed", error=reason)
        self._mask.fill(0)
        self.is_active, self.is_stuck = False, True


class BatchGrammarMatcher:
    """Advances many answers by one token each and fills their masks on threads of xgrammar.

    Filling one mask of 150,000 tokens takes some 40 microseconds. On one thread, hundreds of rows would take longer
    than a decode step; ``skiff bench structured`` measures both ways.
    """

    def __init__(self, masks: Int32, threads: int) -> None:
        """``masks`` int32[slots, words] holds the masks of all matchers, one a row."""
        self._masks = masks
        self._batch = xgrammar.BatchGrammarMatcher(threads)

    def accept(self, matchers: Sequence[GrammarMatcher], slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Advance matcher i, with its mask in row ``slots[i]``, by ``tokens[i]``, and fill the masks still needed."""
        accepted = self._batch.batch_accept_token([each.matcher for each in matchers], list(tokens))
        for matcher, token, was_accepted in zip(matchers, tokens, accepted, strict=True):
            matcher.update_after_token(token, was_accepted)
        active = [(each, slot) for each, slot in zip(matchers, slots, strict=True) if each.is_active]
        filled = len(active) >= MIN_BATCHED_MASKS and self._fill(active)
        for matcher, _ in active:
            if filled:
                matcher.update_after_fill()
            else:
                matcher.fill()

    def _fill(self, active: Sequence[tuple[GrammarMatcher, int]]) -> bool:
        """Fill all masks together. Return False if one of them failed; then each has to be filled by itself."""
        matchers, slots = [each.matcher for each, _ in active], [slot for _, slot in active]
        try:
            self._batch.batch_fill_next_token_bitmask(matchers, self._masks, slots)
        except RuntimeError:
            # The error of a batch does not name the row. Filled one by one, only the faulty row gets stuck.
            return False
        return True
