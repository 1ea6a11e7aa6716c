"""An output parser of a small language with reasoning, content and calls, for tests of the formatters."""

from typing import Final

from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from skiff_runtime.models.config import SamplingDefaults

MODEL: Final = ServedModel(
    name="m", fingerprint="fp_0", vocab_size=9, max_model_len=64, defaults=SamplingDefaults()
)
TEXT: Final = "?why not! yes #sum:1,2; bye #len:3;"
CALLS: Final = [("sum", "1,2"), ("len", "3")]


class MarkerParser:
    """The parser of a small language: ``?`` begins reasoning, ``!`` begins content, ``#name:arguments;`` is a call."""

    def __init__(self) -> None:
        self._kind = "!"
        self._name = ""
        self._calls = -1

    def push(self, text: str) -> list[Delta]:
        return [delta for character in text for delta in self._take(character)]

    def finish(self) -> list[Delta]:
        return [ContentDelta("unfinished " + self._name)] if self._kind == "#" else []

    def _take(self, character: str) -> list[Delta]:
        if self._kind == "#":
            if character != ":":
                self._name += character
                return []
            self._kind, name, self._name = ":", self._name, ""
            self._calls += 1
            return [ToolCallDelta(self._calls, id=f"call-{self._calls}", name=name)]
        if character in "?!#;":
            self._kind = "!" if character == ";" else character
            return []
        if self._kind == ":":
            return [ToolCallDelta(self._calls, arguments=character)]
        return [ReasoningDelta(character) if self._kind == "?" else ContentDelta(character)]
