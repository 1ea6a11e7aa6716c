"""From the api through a tokenizer to the ranks."""

from typing import Any

from msgspec import Struct

from skiff_runtime.messages.encoding import FinishReason
from skiff_runtime.messages.sampling_params import CompiledGrammar, Grammar, SamplingSpec


class TextOptions(Struct, frozen=True, array_like=True):
    """What the detokenizer needs to know of a request. ``include_stop_str_in_output``: a stop string found is shown, too."""

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False


class ChatPrompt(Struct, frozen=True):
    """A conversation to be rendered with the model's chat template.

    ``continue_final_message``: the answer goes on where the last message ends. ``tools``: OpenAI's
    tool objects. ``template_options``: further variables of the template, such as ``enable_thinking``.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}


class TokenizeRequest(Struct, frozen=True, tag="tokenize", array_like=True):
    """api -> tokenizer. ``sampling.max_tokens`` 0 means: what context and KV cache leave.

    ``copies`` requests come of it, with the uids ``uid``, ``uid + 1`` and on, and likewise seeds. A request of
    lower ``priority`` runs earlier. Requests share cached prefixes only under one ``cache_salt``.
    """

    uid: int
    prompt: str | list[int] | ChatPrompt
    sampling: SamplingSpec
    text: TextOptions
    copies: int = 1
    priority: int = 0
    grammar: Grammar | None = None
    cache_salt: bytes = b""


class EncodeRequest(Struct, frozen=True, tag="encode", array_like=True):
    """api -> tokenizer: only tell the token ids of a prompt; answered by ``Encoded`` or ``RequestFailed``."""

    uid: int
    prompt: str | ChatPrompt
    add_special_tokens: bool = True


class DecodeRequest(Struct, frozen=True, tag="decode", array_like=True):
    """api -> tokenizer: only tell the text of token ids; answered by ``Decoded`` or ``RequestFailed``."""

    uid: int
    token_ids: list[int]


class GenerateRequest(Struct, frozen=True, tag="generate", array_like=True):
    """tokenizer -> rank 0. ``token_ids``: bytes of ``Wire.TOKEN``, one or more; ``max_tokens`` 0 as above."""

    uid: int
    token_ids: bytes
    sampling: SamplingSpec
    text: TextOptions
    priority: int = 0
    grammar: CompiledGrammar | None = None
    cache_salt: bytes = b""


class AbortRequest(Struct, frozen=True, tag="abort", array_like=True):
    """End a request: api -> its tokenizer -> rank 0, or detokenizer -> rank 0 (a stop string was found).

    ``finish`` is what the client is told, where anyone still listens.
    """

    uid: int
    finish: FinishReason = FinishReason.ABORT


class FlushCache(Struct, frozen=True, tag="flush", array_like=True):
    """api -> tokenizer -> rank 0: forget every cached prefix that no request holds; answered by ``Flushed``."""

    uid: int


class ProfileSteps(Struct, frozen=True, tag="profile", array_like=True):
    """offline benchmark -> rank 0: write a profile of the next ``steps`` steps (fewer if none follow) to ``path``."""

    steps: int
    path: str


class Shutdown(Struct, frozen=True, tag="shutdown", array_like=True):
    """rank 0 -> other ranks: leave the loop."""


class RankInputs(Struct, frozen=True, tag="inbox", array_like=True):
    """rank 0 -> other ranks: what arrived for this turn of the loop; ``digest`` of the last planned step.

    ``grammars`` are those of requests that rank 0 holds back until it has read them.
    """

    items: list[GenerateRequest | AbortRequest | FlushCache | Shutdown]
    digest: int = 0
    grammars: list[CompiledGrammar] = []
