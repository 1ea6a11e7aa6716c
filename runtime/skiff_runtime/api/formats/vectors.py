"""Responses that are computed from one vector for each choice, instead of text; they are never streamed."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from skiff_runtime.api.formats.openai_errors import OpenAIErrorFormatter
from skiff_runtime.api.formats.request_spec import ChoiceOutput
from skiff_runtime.messages import FinishReason, StreamOpened, TextLogprobs, Usage, Wire
from skiff_runtime.models.embedding_config import Vector


class VectorResponseFormatter(OpenAIErrorFormatter, ABC):
    """A ``ResponseFormatter`` whose choices are vectors."""

    id: str

    @abstractmethod
    def format_vector(self, index: int, vector: Vector) -> dict[str, Any]:
        """Return the fields of choice ``index`` for ``format_full``; called once its vector has arrived."""

    @abstractmethod
    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """Return the JSON body of the response."""

    def make_choice_formatter(self, index: int) -> "VectorChoiceFormatter":
        return VectorChoiceFormatter(self, index)

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        pass

    def format_ending(self, usage: Usage) -> bytes:
        raise AssertionError("vectors are not streamed")


class VectorChoiceFormatter:
    """A ``ChoiceFormatter`` that passes its vector to the response."""

    __slots__ = ("_index", "_response")

    def __init__(self, response: VectorResponseFormatter, index: int) -> None:
        self._response = response
        self._index = index

    def format_opening(self) -> bytes:
        return b""

    def format_prompt_logprobs(self, tokens: list[TextLogprobs]) -> bytes:
        return b""

    def format_delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        return b""

    def format_closing(self, finish_reason: FinishReason) -> bytes:
        return b""

    def format_full(self, output: ChoiceOutput) -> dict[str, Any]:
        return self._response.format_vector(self._index, np.frombuffer(output.vector, Wire.VECTOR))


def format_pooling_usage(usage: Usage) -> dict[str, int]:
    """Return the ``usage`` object of a response without output tokens."""
    return {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
