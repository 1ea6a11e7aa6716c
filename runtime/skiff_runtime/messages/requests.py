"""Messages from the api through a tokenizer to the ranks."""

from typing import Any

from msgspec import Struct

from skiff_runtime.messages.encoding import FinishReason
from skiff_runtime.messages.lora import AdapterRead, LoadAdapter, UnloadAdapter
from skiff_runtime.messages.pooling import PoolingSpec
from skiff_runtime.messages.sampling_spec import CompiledGrammar, Grammar, SamplingSpec
from skiff_runtime.prompt_blocks import PromptBlocks


class TextOptions(Struct, frozen=True, array_like=True):
    """The parameters of a request that concern its text. The detokenizer applies them.

    ``return_token_ids``: ``StreamOpened`` has the ids of the prompt.
    """

    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False


class PromptOptions(Struct, frozen=True, array_like=True):
    """The parameters of a request that the tokenizer applies.

    ``add_special_tokens``: None adds them to a plain text, and not to the text of a chat template, which writes its own.
    ``truncate_prompt_tokens``: only this many of the last tokens are kept; 0 for all, -1 for as many as the context leaves.
    ``bad_words``: texts that the answer must not contain, which become ``SamplingSpec.bad_words``.
    """

    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int = 0
    bad_words: tuple[str, ...] = ()


class ChatPrompt(Struct, frozen=True):
    """A conversation to render with the model's chat template.

    ``continue_final_message``: the answer continues the last message. ``tools``: OpenAI's tool objects.
    ``template_options``: further variables of the template, such as ``enable_thinking``. ``template_hints``: variables
    that the template gets only if it reads them, and if no option sets them.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    template_options: dict[str, Any] = {}
    template_hints: dict[str, Any] = {}


class TokenizeRequest(Struct, frozen=True, tag="tokenize", array_like=True):
    """api -> tokenizer: encode a prompt and send it to rank 0.

    ``sampling.max_tokens`` 0: as many tokens as context and KV cache leave. ``copies``: the number of
    requests to make of it, with consecutive uids and seeds from the given ones. A lower ``priority`` runs
    earlier. Requests share cached prefixes only under the same ``cache_salt``. With ``pooling`` nothing is generated.
    ``prompt_blocks``: those of its prompt, while a router watches; they are reported once they are cached. ``adapter_id``: the
    LoRA adapter that it runs on, 0 for the base model.
    """

    uid: int
    prompt: str | list[int] | ChatPrompt
    sampling: SamplingSpec
    text: TextOptions
    copies: int = 1
    priority: int = 0
    grammar: Grammar | None = None
    cache_salt: bytes = b""
    options: PromptOptions = PromptOptions()
    pooling: PoolingSpec | None = None
    prompt_blocks: PromptBlocks | None = None
    adapter_id: int = 0


class EncodeRequest(Struct, frozen=True, tag="encode", array_like=True):
    """api -> tokenizer: return the token ids of a prompt, as ``Encoded`` or ``RequestFailed``.

    ``with_texts``: with the text of each token.
    """

    uid: int
    prompt: str | ChatPrompt
    add_special_tokens: bool = True
    with_texts: bool = False


class DecodeRequest(Struct, frozen=True, tag="decode", array_like=True):
    """api -> tokenizer: return the text of token ids, as ``Decoded`` or ``RequestFailed``."""

    uid: int
    token_ids: list[int]


class GenerateRequest(Struct, frozen=True, tag="generate", array_like=True):
    """tokenizer -> rank 0: generate, or with ``pooling`` compute a vector.

    ``token_ids``: bytes of ``Wire.TOKEN``, at least one; ``max_tokens`` 0, ``prompt_blocks`` and ``adapter_id`` as
    above.
    """

    uid: int
    token_ids: bytes
    sampling: SamplingSpec
    text: TextOptions
    priority: int = 0
    grammar: CompiledGrammar | None = None
    cache_salt: bytes = b""
    pooling: PoolingSpec | None = None
    prompt_blocks: PromptBlocks | None = None
    adapter_id: int = 0


class AbortRequest(Struct, frozen=True, tag="abort", array_like=True):
    """End a request: api -> its tokenizer -> rank 0, or detokenizer -> rank 0 (it found a stop string).

    ``finish``: the finish reason that the client receives, if it is still connected.
    """

    uid: int
    finish: FinishReason = FinishReason.ABORT


class FlushCache(Struct, frozen=True, tag="flush", array_like=True):
    """api -> tokenizer -> rank 0: free every cached page that no request has locked. The reply is ``Flushed``."""

    uid: int


class ProfileSteps(Struct, frozen=True, tag="profile", array_like=True):
    """offline benchmark -> rank 0: write a profile of the next ``steps`` steps (fewer if the engine idles) to ``path``."""

    steps: int
    path: str


class Shutdown(Struct, frozen=True, tag="shutdown", array_like=True):
    """rank 0 -> other ranks: leave the loop."""


class RankInputs(Struct, frozen=True, tag="inbox", array_like=True):
    """rank 0 -> other ranks: the inputs of this turn of the loop, and rank 0's lockstep ``checksum``.

    ``grammars``: those of the items, which have the keys alone, and of requests that rank 0 holds back until it has loaded them;
    the others load them now.
    """

    items: list[
        GenerateRequest | AbortRequest | FlushCache | LoadAdapter | UnloadAdapter | AdapterRead | Shutdown
    ]
    checksum: int = 0
    grammars: list[CompiledGrammar] = []
