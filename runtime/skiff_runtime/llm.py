"""Offline generation: ``LLM`` runs the ranks of a service without its HTTP front.

    with LLM("demo://") as llm:
        for completion in llm.generate(["What is a pod?", "Kubernetes is"], max_tokens=32):
            print(completion.text)

Tokenizing and detokenizing happen in the caller's process, by the same code as in a server.
One ``LLM`` is for one thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np

from skiff_runtime.backend import Backend
from skiff_runtime.config import Config, field_names
from skiff_runtime.errors import ConfigError, InvalidRequest, RequestError
from skiff_runtime.messages import (
    AbortRequest,
    ChatPrompt,
    Finish,
    GenerateRequest,
    RequestFailed,
    TextBatch,
    TextOptions,
    TokenizeRequest,
    Usage,
    Wire,
)
from skiff_runtime.resolve import resolve
from skiff_runtime.sampling import Sampling
from skiff_runtime.tokenizer.detokenizer import Detokenizer, load_decoder
from skiff_runtime.tokenizer.worker import load_builder

Prompt = str | list[int]
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Completion:
    """One prompt's outcome. ``finish_reason``: "stop" or "length"."""

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int


class _Growing:
    """A completion while it is being made."""

    __slots__ = ("texts", "token_ids")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []

    def completed(self, finish: int, usage: Usage) -> Completion:
        return Completion(
            text="".join(self.texts),
            token_ids=self.token_ids,
            finish_reason=Finish(finish).name.lower(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
        )


class LLM:
    """A model, ready to complete prompts. Options are the fields of ``Config`` (``tp=2``, ``page_size=64`` …)."""

    def __init__(
        self, model: str = "demo://", *, on_phase: Callable[[str, str], None] | None = None, **options: Any
    ) -> None:
        """Load the model; ``on_phase(process, phase)`` is called as its ranks start.

        Raises ConfigError, ModelError or FetchError naming what to change, StartupError when a rank fails.
        """
        unknown = sorted(set(options) - set(field_names()))
        if unknown:
            raise ConfigError(f"LLM has no option {unknown[0]!r}; options are the fields of Config")
        config, self._model = resolve(_config({"model": model, **options}))
        self._backend = Backend(config, self._model, on_phase=on_phase)
        try:
            self._builder = load_builder(self._backend.launch)
            self._detokenizer = Detokenizer(load_decoder(self._backend.launch))
            self._backend.wait_ready()
        except BaseException:
            self._backend.close()
            raise
        self._window = config.running_limit + max(1, config.max_queued_requests)
        self._next_uid = 0
        self._growing: dict[int, _Growing] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        on_progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Complete each prompt (a text, or token ids); completions in the order of prompts.

        ``sampling``: one for all, or one each; ``options`` change single fields of it.
        ``on_progress`` is told how many tokens came, after each step. Raises RequestError
        for a prompt that cannot be served, before anything is computed, and SkiffError when
        the engine fails.
        """
        asked = _as_list(prompts)
        return self._run([*asked], _one_each(sampling, len(asked), options), on_progress)

    def chat(
        self, messages: Sequence[Message], sampling: Sampling | None = None, **options: Any
    ) -> Completion:
        """Answer one conversation, rendered with the model's chat template."""
        prompt = ChatPrompt(messages=[*messages])
        return self._run([prompt], _one_each(sampling, 1, options), None)[0]

    def close(self) -> None:
        """End the ranks; idempotent."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: list[Prompt | ChatPrompt],
        samplings: list[Sampling],
        on_progress: Callable[[int], None] | None,
    ) -> list[Completion]:
        requests = [self._request(prompt, each) for prompt, each in zip(prompts, samplings, strict=True)]
        first = self._next_uid - len(requests)
        done: dict[int, Completion] = {}
        waiting = iter(requests)
        try:
            while len(done) < len(requests):
                self._submit(waiting)
                batch, stopped = self._detokenizer.detokenize(self._backend.receive())
                for uid in stopped:
                    self._backend.send(AbortRequest(uid=uid, finish=Finish.STOP))
                done.update(self._collect(batch))
                if on_progress is not None:
                    on_progress(len(batch.texts))
        finally:
            self._abandon()
        return [done[first + index] for index in range(len(requests))]

    def _request(self, prompt: Prompt | ChatPrompt, sampling: Sampling) -> GenerateRequest:
        self._next_uid += 1
        return self._builder.build(
            TokenizeRequest(
                uid=self._next_uid - 1,
                prompt=prompt,
                sampling=sampling.params(self._model.sampling),
                text=TextOptions(stop=sampling.stop, skip_special_tokens=sampling.skip_special_tokens),
            )
        )

    def _submit(self, waiting: Iterator[GenerateRequest]) -> None:
        """Keep as many requests in flight as the scheduler is meant to hold."""
        while len(self._growing) < self._window and (request := next(waiting, None)) is not None:
            self._growing[request.uid] = _Growing()
            self._backend.send(request)

    def _collect(self, batch: TextBatch) -> Iterator[tuple[int, Completion]]:
        for failed in batch.failed:
            if self._growing.pop(failed.uid, None) is not None:  # else of an earlier call
                raise _as_error(failed)
        uids = np.frombuffer(batch.uids, dtype=Wire.UID).tolist()
        tokens = np.frombuffer(batch.tokens, dtype=Wire.TOKEN).tolist()
        usages = iter(batch.usages)
        for uid, text, token, finish in zip(uids, batch.texts, tokens, batch.finishes, strict=True):
            usage = next(usages) if finish else None
            growing = self._growing.get(uid)
            if growing is None:  # of an earlier call that ended with an error
                continue
            growing.texts.append(text)
            if token >= 0:
                growing.token_ids.append(token)
            if usage is not None:
                del self._growing[uid]
                yield uid, growing.completed(finish, usage)

    def _abandon(self) -> None:
        """After an error: end what is still in flight, so that the next call starts afresh."""
        for uid in self._growing:
            self._backend.send(AbortRequest(uid=uid))
        self._growing.clear()


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


def _one_each(
    sampling: Sampling | Sequence[Sampling] | None, count: int, options: dict[str, Any]
) -> list[Sampling]:
    if sampling is None or isinstance(sampling, Sampling):
        return [replace(sampling or Sampling(), **options)] * count
    if len(sampling) != count:
        raise InvalidRequest(
            f"{count} prompts need one sampling or {count}, not {len(sampling)}", param="sampling"
        )
    return [replace(each, **options) for each in sampling]


def _as_error(failed: RequestFailed) -> RequestError:
    error = RequestError(failed.message, param=failed.param, code=failed.code)
    error.status, error.kind = failed.status, failed.kind
    return error
