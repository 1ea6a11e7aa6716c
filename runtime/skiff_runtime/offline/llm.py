"""Offline generation: ``LLM`` runs the ranks of a service without its HTTP front.

    with LLM("demo://") as llm:
        for completion in llm.generate(["What is a pod?", "Kubernetes is"], max_tokens=32):
            print(completion.text)
        for increment in llm.stream([{"role": "user", "content": "What is a pod?"}]):
            print(increment.text, end="")

Tokenizing and detokenizing happen in the caller's process, by the same code as in a server.
One ``LLM`` is for one thread, which must outlive it.
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
    ProfileSteps,
    StepStats,
    TokenizeRequest,
    Wire,
)
from skiff_runtime.offline.engine_client import EngineClient
from skiff_runtime.offline.outputs import Completion, CompletionDelta, Draft
from skiff_runtime.offline.request_tracker import RequestTracker
from skiff_runtime.offline.sampling_params import Sampling
from skiff_runtime.processes.resolve import resolve
from skiff_runtime.progress import Counter
from skiff_runtime.tokenizer.detokenizer import Detokenizer, load_decoder
from skiff_runtime.tokenizer.tokenizer_worker import copies, load_prompt_builder

Prompt = str | list[int]
Message = dict[str, Any]
OnProgress = Callable[[int], None]


class LLM:
    """A model, ready to complete prompts. Options are the fields of ``Config`` (``tp=2``, ``page_size=64`` …)."""

    def __init__(
        self, model: str = "demo://", *, on_phase: Callable[[str, str], None] | None = None, **options: Any
    ) -> None:
        """Load the model; ``on_phase(process, phase)`` is called as its ranks start.

        Raises ConfigError, ModelError or FetchError naming what to change, StartupError when a rank fails.
        """
        unknown = sorted(set(options) - set(field_names()))
        if unknown and (renamed := RENAMED_FIELDS.get(unknown[0])):
            raise ConfigError(f"LLM's option {unknown[0]!r} is now {renamed!r}")
        if unknown:
            raise ConfigError(f"LLM has no option {unknown[0]!r}; options are the fields of Config")
        config, self._model = resolve(_config({"model": model, **options}))
        self._backend = EngineClient(config, self._model, on_phase=on_phase)
        try:
            self._builder = load_prompt_builder(self._backend.launch)
            detokenizer = Detokenizer(load_decoder(self._backend.launch))
            self._backend.wait_ready()
        except BaseException:
            self._backend.close()
            raise
        window = config.running_limit + max(1, config.max_queued_requests)
        self._in_flight = RequestTracker(
            self._backend, detokenizer, window=window, max_tokens=config.max_queued_tokens
        )
        self._next_uid = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        progress: bool = False,
        on_progress: OnProgress | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete each prompt (a text, or token ids); ``n`` completions of each, in the order of prompts.

        ``sampling``: one for all, or one each; ``options`` change single fields of it. ``progress``
        shows a bar in a terminal; ``on_progress`` is told how many tokens came, after each step.
        Raises RequestError for a prompt that cannot be served, before anything is computed, and
        SkiffError when the engine fails.
        """
        asked = _as_list(prompts)
        requests = self._requests([*asked], _one_each(sampling, len(asked), options))
        return self._run(requests, progress, on_progress)

    def chat(
        self, messages: Sequence[Message], sampling: Sampling | None = None, **options: Any
    ) -> Completion:
        """Answer one conversation, rendered with the model's chat template.

        ``options`` change single fields of ``sampling``; among them may be ``continue_final_message``,
        ``tools`` (OpenAI's tool objects) and ``template_options`` (variables of the template).
        """
        prompt, rest = _chat_prompt(messages, options)
        [chosen] = _one_each(sampling, 1, rest)
        if chosen.n != 1:
            raise InvalidRequest("chat gives one answer; for n of them, use stream or ask again", param="n")
        return self._run(self._requests([prompt], [chosen]), progress=False, on_progress=None)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling: Sampling | None = None, **options: Any
    ) -> Generator[CompletionDelta, None, None]:
        """The completions of one prompt or conversation while they come, step by step.

        An increment's ``index`` tells which of the ``n`` completions it belongs to. Closing the
        generator (or leaving a ``for`` over it and dropping it) ends the request. Errors as of ``generate``,
        those of the prompt at once.
        """
        asked, rest = _stream_prompt(prompt, options)
        return self._increments(self._requests([asked], _one_each(sampling, 1, rest)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises RequestError where it has none, or too many."""
        request = EncodeRequest(uid=0, prompt=text, add_special_tokens=add_special_tokens)
        ids: list[int] = np.frombuffer(self._builder.encode(request).token_ids, Wire.TOKEN).tolist()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included. Raises RequestError for an id outside the vocabulary."""
        return self._builder.encoder.decode([*token_ids])

    def watch_steps(self, on_step: Callable[[StepStats], None]) -> None:
        """From now on, tell ``on_step`` of each step while completions are awaited."""
        self._backend.on_step = on_step

    def profile(self, path: Path, *, steps: int) -> None:
        """Let rank 0 write a trace of torch's profiler (JSON, packed by gzip) of its next ``steps`` steps to ``path``.

        It is there soon after the last of them, or when no work is left before.
        """
        self._backend.send(ProfileSteps(steps=steps, path=str(path.absolute())))

    def close(self) -> None:
        """End the ranks; idempotent."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _requests(
        self, prompts: list[Prompt | ChatPrompt], samplings: list[Sampling]
    ) -> list[GenerateRequest]:
        """What the ranks are asked, ``n`` requests for each prompt, with uids that count upwards."""
        requests: list[GenerateRequest] = []
        for prompt, sampling in zip(prompts, samplings, strict=True):
            told = TokenizeRequest(
                uid=self._next_uid + len(requests),
                prompt=prompt,
                sampling=sampling.params(self._model),
                text=sampling.text_options(),
            )
            built = self._builder.build(told)
            constraint = sampling.constraint()
            if constraint is not None:
                built = msgspec.structs.replace(built, grammar=self._backend.compile(constraint))
            requests += copies(built, sampling.n)
        self._next_uid += len(requests)
        return requests

    def _run(
        self, requests: list[GenerateRequest], progress: bool, on_progress: OnProgress | None
    ) -> list[Completion]:
        drafts = [Draft() for _ in requests]
        with contextlib.ExitStack() as stack:
            bar = stack.enter_context(Counter("completions", len(requests))) if progress else None
            for news in stack.enter_context(contextlib.closing(self._in_flight.run(requests))):
                for each in news:
                    drafts[each.index].add(each)
                tokens = sum(len(each.token_ids) for each in news)
                if bar is not None:
                    bar.advance(done=sum(each.finish_reason is not None for each in news), tokens=tokens)
                if on_progress is not None:
                    on_progress(tokens)
        return [each.completion() for each in drafts]

    def _increments(self, requests: list[GenerateRequest]) -> Generator[CompletionDelta, None, None]:
        with contextlib.closing(self._in_flight.run(requests)) as steps:
            for news in steps:
                yield from news


def _config(options: dict[str, Any]) -> Config:
    """A configuration of values whose types nobody has checked yet."""
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


def _stream_prompt(
    prompt: Prompt | Sequence[Message], options: dict[str, Any]
) -> tuple[Prompt | ChatPrompt, dict[str, Any]]:
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        return _chat_prompt(prompt, options)  # type: ignore[arg-type]
    return _as_list(prompt)[0] if prompt else [], options  # type: ignore[arg-type]


def _chat_prompt(messages: Sequence[Message], options: dict[str, Any]) -> tuple[ChatPrompt, dict[str, Any]]:
    """The conversation, and the options that are not its own."""
    own = ("continue_final_message", "tools", "template_options")
    given = {name: options[name] for name in own if name in options}
    continues = bool(given.get("continue_final_message"))
    prompt = ChatPrompt(messages=[*messages], add_generation_prompt=not continues, **given)
    return prompt, {name: value for name, value in options.items() if name not in own}


def _one_each(
    sampling: Sampling | Sequence[Sampling] | None, count: int, options: dict[str, Any]
) -> list[Sampling]:
    unknown = sorted(set(options) - set(Sampling.__dataclass_fields__))
    if unknown:
        raise InvalidRequest(f"there is no option {unknown[0]!r}; options are the fields of Sampling")
    if sampling is None or isinstance(sampling, Sampling):
        return [replace(sampling or Sampling(), **options)] * count
    if len(sampling) != count:
        raise InvalidRequest(
            f"{count} prompts need one sampling or {count}, not {len(sampling)}", param="sampling"
        )
    return [replace(each, **options) for each in sampling] if options else [*sampling]
