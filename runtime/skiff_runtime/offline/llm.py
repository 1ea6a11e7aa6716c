"""Offline generation: ``LLM`` runs the ranks of a service without its HTTP front end.

    with LLM("demo://") as llm:
        for completion in llm.generate(["What is a pod?", "Kubernetes is"], max_tokens=32):
            print(completion.text)
        for delta in llm.stream([{"role": "user", "content": "What is a pod?"}]):
            print(delta.text, end="")
        [query, document] = llm.embed(["What is a pod?", "A pod is a group of containers."])

LoRA adapters are loaded at the start (``lora``) or later (``load_lora_adapter``), and chosen by name for each prompt:

    with LLM("demo://", lora=("sql=hf://org/sql-adapter",)) as llm:
        [adapted, plain] = llm.generate(["SELECT", "SELECT"], lora=["sql", None])

The caller's process tokenizes and detokenizes, by the same code as a server's processes.
An ``LLM`` may be used by one thread at a time. The thread that creates it must outlive it, for its ranks end with it.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from skiff_runtime.config import Config, field_names
from skiff_runtime.config.renamed_options import RENAMED_FIELDS
from skiff_runtime.errors import ConfigError, InvalidRequest
from skiff_runtime.messages import (
    ChatPrompt,
    EncodeRequest,
    GenerateRequest,
    PoolingSpec,
    ProfileSteps,
    PromptOptions,
    SamplingSpec,
    StepStats,
    TextOptions,
    TokenizeRequest,
    Wire,
)
from skiff_runtime.models.embedding_config import Vector, cut_vector
from skiff_runtime.models.scoring import Scorer, choose_rerank_template
from skiff_runtime.offline.engine_client import EngineClient
from skiff_runtime.offline.loaded_adapters import LoadedAdapters, LoraChoice
from skiff_runtime.offline.outputs import Completion, CompletionBuilder, CompletionDelta
from skiff_runtime.offline.request_tracker import RequestTracker
from skiff_runtime.offline.sampling_params import SamplingParams
from skiff_runtime.processes.resolve import resolve
from skiff_runtime.progress import ProgressBar
from skiff_runtime.tokenizer.detokenizer import Detokenizer, load_decoder
from skiff_runtime.tokenizer.tokenizer_worker import expand_copies, load_prompt_builder

Prompt = str | list[int]
Message = dict[str, Any]
OnProgress = Callable[[int], None]


class LLM:
    """A model that completes prompts. Its options are the fields of ``Config``, such as ``tp_size=2``."""

    def __init__(
        self, model: str = "demo://", *, on_phase: Callable[[str, str], None] | None = None, **options: Any
    ) -> None:
        """Load the model. ``on_phase(process, phase)`` is called at each start phase of a rank, and before
        adapters are loaded.

        Raises:
            ConfigError: an option is unknown or malformed, or an adapter of ``lora`` is missing or cannot be served.
            ModelError: the model's files are missing or not supported.
            FetchError: an ``hf://`` model or adapter cannot be downloaded.
            StartupError: a rank has failed to start.
        """
        _check_option_names(options)
        config, self._model = resolve(_make_config({"model": model, **options}))
        self._embedding = self._model.embedding.with_pooling_type(config.pooling_type)
        self._rerank_template = choose_rerank_template(config, self._model)
        self._engine = EngineClient(config, self._model, on_phase=on_phase)
        try:
            self._prompt_builder = load_prompt_builder(self._engine.launch)
            detokenizer = Detokenizer(load_decoder(self._engine.launch))
            self._engine.wait_ready()
            max_requests = config.running_limit + max(1, config.max_queued_requests)
            self._tracker = RequestTracker(
                self._engine, detokenizer, max_requests=max_requests, max_tokens=config.max_queued_tokens
            )
            self._adapters = LoadedAdapters(config, self._tracker)
            if config.lora and on_phase is not None:
                on_phase("llm", "adapters")
            self._adapters.load_configured()
        except BaseException:
            self._engine.close()
            raise
        self._next_uid = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: LoraChoice = None,
        progress: bool = False,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete each prompt, a text or token ids. Returns ``n`` completions per prompt, in the order of prompts.

        Args:
            prompts: one prompt, or several.
            sampling_params: one for all prompts, or one for each.
            lora: the name of a loaded LoRA adapter for all prompts, or one for each; None is the model itself.
            progress: show a progress bar in a terminal.
            on_progress: called after each step with the number of tokens that it has generated.
            options: single fields of ``SamplingParams``, which override those of ``sampling_params``.

        Raises:
            RequestError: a prompt cannot be served; raised before anything is computed.
            SkiffError: the engine has failed.
        """
        listed = _as_list(prompts)
        params = _one_per_prompt(sampling_params, len(listed), options)
        requests = self._make_requests([*listed], params, self._adapters.find_each(lora, len(listed)))
        return self._run(requests, progress, on_progress)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        **options: Any,
    ) -> Completion:
        """Complete one conversation, rendered with the model's chat template, by the model or the adapter ``lora``.

        ``options`` override single fields of ``sampling_params``. They may also contain ``continue_final_message``,
        ``tools`` (OpenAI's tool objects) and ``template_options`` (variables of the template). Errors as those of
        ``generate``.
        """
        prompt, rest = _make_chat_prompt(messages, options)
        [chosen] = _one_per_prompt(sampling_params, 1, rest)
        if chosen.n != 1:
            raise InvalidRequest("chat returns one completion; for n of them, use stream", param="n")
        requests = self._make_requests([prompt], [chosen], [self._adapters.find(lora)])
        return self._run(requests, progress=False, on_progress=None)[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        **options: Any,
    ) -> Generator[CompletionDelta, None, None]:
        """Yield the completions of one prompt or conversation in deltas, step by step, by the model or the adapter ``lora``.

        A delta's ``index`` is that of its completion among the ``n``. Closing the generator, or leaving a loop over
        it, aborts the request. Errors as those of ``generate``; an invalid prompt raises at once, not at the first
        delta.
        """
        chosen, rest = _as_prompt(prompt, options)
        params = _one_per_prompt(sampling_params, 1, rest)
        return self._stream_deltas(self._make_requests([chosen], params, [self._adapters.find(lora)]))

    def embed(
        self,
        inputs: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        lora: str | None = None,
    ) -> list[Vector]:
        """Return the embedding of each input, a text or token ids, as float32[size].

        Args:
            inputs: one input, or several.
            dimensions: cut the vectors to this many numbers (Matryoshka), before they are normalized.
            normalize: scale the vectors to length 1 (default: as the model's sentence-transformers files say; True
                without these).
            prompt_name: the model's prompt that precedes each text, such as "query" (default: the model's default).
            lora: the name of a loaded LoRA adapter; None is the model itself.

        Raises:
            RequestError: an input or option cannot be served; raised before anything is computed.
            SkiffError: the engine has failed.
        """
        embedding = self._embedding
        size = embedding.check_dimensions(dimensions)
        prompts = [embedding.add_prompt(each, prompt_name) for each in _as_list(inputs)]
        vectors = self._pool(prompts, embedding.make_pooling_spec(), adapter_id=self._adapters.find(lora))
        chosen = embedding.normalize if normalize is None else normalize
        return [cut_vector(vector, size, normalize=chosen) for vector in vectors]

    def score(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        instruct: str | None = None,
        lora: str | None = None,
    ) -> list[float]:
        """Return the score of the query with each document; of several queries, that of each with its document.

        A reranker returns the probability that the document answers the query, under the task ``instruct``; any other
        model the cosine similarity of embeddings. ``lora`` and errors as those of ``embed``.
        """
        queries = [query] if isinstance(query, str) else [*query]
        texts = [documents] if isinstance(documents, str) else [*documents]
        if len(queries) not in (1, len(texts)):
            raise InvalidRequest(f"{len(queries)} queries cannot be paired with {len(texts)} documents")
        scorer = Scorer.make(self._rerank_template, instruct, num_first=len(queries), count=len(texts))
        pooling = scorer.pooling or self._embedding.make_pooling_spec()
        prompts = scorer.make_prompts(queries, texts, self._embedding)
        adapter_id = self._adapters.find(lora)
        vectors = self._pool(
            prompts, pooling, adapter_id=adapter_id, add_special_tokens=scorer.template is None
        )
        return scorer.compute_scores(vectors)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError if there are none, or too many."""
        request = EncodeRequest(uid=0, prompt=text, add_special_tokens=add_special_tokens)
        ids: list[int] = np.frombuffer(self._prompt_builder.encode(request).token_ids, Wire.TOKEN).tolist()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included. Raises RequestError for ids out of vocabulary."""
        return self._prompt_builder.encoder.decode([*token_ids])

    def load_lora_adapter(self, name: str, uri: str, *, load_inplace: bool = False) -> None:
        """Load a LoRA adapter, as peft writes them, which calls may choose by its name from now on.

        Args:
            name: not that of the model.
            uri: a directory, or a URI as of a model, from which it is downloaded if needed.
            load_inplace: it may replace an adapter of the same name, whose open streams go on.

        Raises:
            InvalidRequest: the name cannot be used or is taken, the adapter cannot be served, or the LLM has been created
                without ``enable_lora``.
            ConfigError: there is no adapter at the URI.
            FetchError: it cannot be downloaded.
            Unavailable: a rank has ended or hangs.
        """
        self._adapters.load(name, uri, replaces=load_inplace)

    def unload_lora_adapter(self, name: str) -> None:
        """Unload a LoRA adapter; streams that have begun go on. Raises ModelNotFound if there is none of this name."""
        self._adapters.unload(name)

    def watch_steps(self, on_step: Callable[[StepStats], None]) -> None:
        """Call ``on_step`` with the statistics of each step from now on, as calls of this LLM receive them."""
        self._engine.on_step = on_step

    def profile(self, path: Path, *, steps: int) -> None:
        """Profile the next ``steps`` steps of rank 0 with torch's profiler, and write the trace to ``path``.

        The trace is JSON, compressed with gzip if the name ends so. The file appears soon after the last of the
        steps, or once no request is left.
        """
        self._engine.send(ProfileSteps(steps=steps, path=str(path.absolute())))

    def close(self) -> None:
        """End the ranks. Further calls of ``close`` do nothing."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_requests(
        self,
        prompts: list[Prompt | ChatPrompt],
        sampling_params: list[SamplingParams],
        adapter_ids: list[int],
    ) -> list[GenerateRequest]:
        """Tokenize the prompts and return ``n`` requests for each, with consecutive uids."""
        if self._model.embedding_only:
            raise InvalidRequest(
                "this model has no output head: it computes embeddings (embed), and does not generate text",
                code="model_not_generative",
            )
        requests: list[GenerateRequest] = []
        for prompt, params, adapter_id in zip(prompts, sampling_params, adapter_ids, strict=True):
            request = self._prompt_builder.build(
                TokenizeRequest(
                    uid=self._next_uid + len(requests),
                    prompt=prompt,
                    sampling=params.to_spec(self._model),
                    text=params.to_text_options(),
                    adapter_id=adapter_id,
                )
            )
            grammar = params.to_grammar()
            if grammar is not None:
                request = msgspec.structs.replace(request, grammar=self._engine.compile(grammar))
            requests += expand_copies(request, params.n)
        self._next_uid += len(requests)
        return requests

    def _pool(
        self,
        prompts: Sequence[Prompt],
        pooling: PoolingSpec,
        *,
        adapter_id: int,
        add_special_tokens: bool = True,
    ) -> list[Vector]:
        """Return the vector of each prompt."""
        requests = [
            self._prompt_builder.build(
                TokenizeRequest(
                    uid=self._next_uid + number,
                    prompt=prompt,
                    sampling=SamplingSpec(max_tokens=0, seed=0),
                    text=TextOptions(),
                    pooling=pooling,
                    options=PromptOptions(add_special_tokens=add_special_tokens),
                    adapter_id=adapter_id,
                )
            )
            for number, prompt in enumerate(prompts)
        ]
        self._next_uid += len(requests)
        vectors: dict[int, Vector] = {}
        with contextlib.closing(self._tracker.run(requests)) as steps:
            for deltas in steps:
                vectors |= {
                    each.index: np.frombuffer(each.vector, Wire.VECTOR) for each in deltas if each.vector
                }
        return [vectors[index] for index in range(len(requests))]

    def _run(
        self, requests: list[GenerateRequest], progress: bool, on_progress: OnProgress | None
    ) -> list[Completion]:
        builders = [CompletionBuilder() for _ in requests]
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(ProgressBar("completions", len(requests))) if progress else None
            for deltas in stack.enter_context(contextlib.closing(self._tracker.run(requests))):
                for each in deltas:
                    builders[each.index].add(each)
                tokens = sum(len(each.token_ids) for each in deltas)
                if bar is not None:
                    bar.advance(done=sum(each.finish_reason is not None for each in deltas), tokens=tokens)
                if on_progress is not None:
                    on_progress(tokens)
        return [each.completion() for each in builders]

    def _stream_deltas(self, requests: list[GenerateRequest]) -> Generator[CompletionDelta, None, None]:
        # Apart from stream(), which is no generator itself: it raises the errors of a prompt when it is called.
        with contextlib.closing(self._tracker.run(requests)) as steps:
            for deltas in steps:
                yield from deltas


def _check_option_names(options: dict[str, Any]) -> None:
    for name in sorted(set(options) - set(field_names())):
        if name in RENAMED_FIELDS:
            raise ConfigError(f"LLM's option {name!r} is now {RENAMED_FIELDS[name]!r}")
        raise ConfigError(f"LLM has no option {name!r}; its options are the fields of Config")


def _make_config(options: dict[str, Any]) -> Config:
    """Build a configuration from values whose types are not checked yet."""
    try:
        return msgspec.convert(options, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"an option of LLM is malformed: {error}") from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(each, int) for each in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def _as_prompt(
    prompt: Prompt | Sequence[Message], options: dict[str, Any]
) -> tuple[Prompt | ChatPrompt, dict[str, Any]]:
    """Return a prompt or a conversation as a prompt, and the sampling options among ``options``."""
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        return _make_chat_prompt(prompt, options)  # type: ignore[arg-type]
    return _as_list(prompt)[0] if prompt else [], options  # type: ignore[arg-type]


def _make_chat_prompt(
    messages: Sequence[Message], options: dict[str, Any]
) -> tuple[ChatPrompt, dict[str, Any]]:
    """Return a conversation as a prompt, and the sampling options among ``options``."""
    chat_options = ("continue_final_message", "tools", "template_options")
    given = {name: options[name] for name in chat_options if name in options}
    continues = bool(given.get("continue_final_message"))
    prompt = ChatPrompt(messages=[*messages], add_generation_prompt=not continues, **given)
    return prompt, {name: value for name, value in options.items() if name not in chat_options}


def _one_per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int, options: dict[str, Any]
) -> list[SamplingParams]:
    """Return the parameters of each of ``count`` prompts, with the fields in ``options`` overridden."""
    unknown = sorted(set(options) - set(SamplingParams.__dataclass_fields__))
    if unknown:
        raise InvalidRequest(f"there is no option {unknown[0]!r}; options are the fields of SamplingParams")
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [replace(sampling_params or SamplingParams(), **options)] * count
    if len(sampling_params) != count:
        raise InvalidRequest(
            f"{count} prompts need one SamplingParams or {count}, not {len(sampling_params)}",
            param="sampling_params",
        )
    return [replace(each, **options) for each in sampling_params] if options else [*sampling_params]
