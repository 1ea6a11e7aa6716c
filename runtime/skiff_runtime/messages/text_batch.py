"""From tokenizers and the detokenizer to the api."""

from msgspec import Struct

from skiff_runtime.messages.token_batch import Flushed, RequestFailed, StepStats, StreamOpened


class Encoded(Struct, frozen=True, tag="encoded", array_like=True):
    """tokenizer -> api. ``token_ids``: bytes of ``Wire.TOKEN``; ``texts``: what each writes by itself."""

    uid: int
    token_ids: bytes
    texts: list[str]


class Decoded(Struct, frozen=True, tag="decoded", array_like=True):
    """tokenizer -> api."""

    uid: int
    text: str


class TokenText(Struct, frozen=True, array_like=True, gc=False):
    """One token: id, the bytes it writes by itself, and its log-probability."""

    token: int
    data: bytes
    logprob: float


class TextLogprobs(Struct, frozen=True, array_like=True):
    """As ``TokenLogprobs``, with texts. ``row`` is that of the ``TextBatch``; -1 for a token of the prompt."""

    row: int
    chosen: TokenText
    top: list[TokenText]


class PromptTextLogprobs(Struct, frozen=True, array_like=True):
    """As ``PromptLogprobs``, with texts, one entry for each token; ``top`` of the one at position 0 is empty."""

    uid: int
    start: int
    tokens: list[TextLogprobs]


class Usage(Struct, frozen=True, array_like=True):
    """Token counts of one ended request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TextBatch(Struct, frozen=True, tag="text", array_like=True):
    """detokenizer -> api. ``opened`` and rows as in ``TokenBatch``; ``texts`` may hold "" (bytes held back).

    ``usages`` has one entry for each row whose finish is not ``RUNNING``, in order of rows.
    """

    uids: bytes
    texts: list[str]
    tokens: bytes
    finishes: bytes
    usages: list[Usage]
    failed: list[RequestFailed]
    stats: StepStats
    logprobs: list[TextLogprobs] = []
    prompt_logprobs: list[PromptTextLogprobs] = []
    flushed: list[Flushed] = []
    opened: list[StreamOpened] = []
