"""The served model as the endpoints see it, and the sampling parameters that it fills in where a request leaves them out."""

import hashlib
import re
import secrets
from dataclasses import dataclass, field, replace
from typing import Final

from skiff_runtime import contract
from skiff_runtime.api.parsing.output_format import OutputFormat
from skiff_runtime.api.schemas.request_bodies import SamplingFields
from skiff_runtime.errors import InvalidRequest, ModelNotFound
from skiff_runtime.messages import PoolingSpec, PromptOptions, SamplingSpec, TextOptions
from skiff_runtime.models.config import SamplingDefaults
from skiff_runtime.models.embedding_config import EmbeddingConfig
from skiff_runtime.models.scoring import choose_rerank_template
from skiff_runtime.processes.launch import Launch
from skiff_runtime.sse import encode_json
from skiff_runtime.version import __version__

_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_MAX_SHOWN_CHARACTERS: Final = 40


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model's name, limits and defaults.

    ``fingerprint`` is the ``system_fingerprint`` of responses: equal where version, model and configuration are equal.
    ``is_strict``: hints are refused. ``rerank_template``: the prompt with which a reranker judges a pair; None scores by
    the similarity of embeddings. ``embedding_only``: the model has no output head.

    Each LoRA adapter is a served model of its own, which ``choose`` finds in ``adapters`` by its name. ``adapter_id`` is 0 for
    the base model; ``root`` is the URI of the files, and ``parent`` the name of an adapter's base model.
    """

    name: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    defaults: SamplingDefaults
    output_format: OutputFormat = OutputFormat()
    is_strict: bool = False
    embedding: EmbeddingConfig = EmbeddingConfig(size=0)
    rerank_template: str | None = None
    embedding_only: bool = False
    root: str = ""
    parent: str | None = None
    adapter_id: int = 0
    adapters: dict[str, "ServedModel"] = field(default_factory=dict, compare=False)

    @staticmethod
    def from_launch(launch: Launch) -> "ServedModel":
        """Describe the model of a resolved launch."""
        name, max_model_len = launch.config.served_model_name, launch.config.max_model_len
        assert name is not None and max_model_len is not None, "the configuration is resolved"
        return ServedModel(
            name=name,
            fingerprint=_fingerprint(launch),
            vocab_size=launch.model.vocab_size,
            max_model_len=max_model_len,
            defaults=launch.model.sampling,
            embedding=launch.model.embedding.with_pooling_type(launch.config.pooling_type),
            output_format=OutputFormat.from_launch(launch),
            is_strict=launch.config.strict,
            rerank_template=choose_rerank_template(launch.config, launch.model),
            embedding_only=launch.model.embedding_only,
            root=launch.config.model,
        )

    def choose(self, name: str | None) -> "ServedModel":
        """Return the model or the adapter that ``name`` names; None stands for the model.

        Raises ``ModelNotFound`` if there is none.
        """
        if name is None or name == self.name:
            return self
        adapter = self.adapters.get(name)
        if adapter is None:
            others = (
                f", with {len(self.adapters)} adapters (GET {contract.PATH_MODELS})" if self.adapters else ""
            )
            raise ModelNotFound(
                f"the model {name[:200]!r} is not served here; the served model is {self.name!r}{others}",
                param="model",
            )
        return adapter

    def make_adapter(self, adapter_id: int, name: str, uri: str) -> "ServedModel":
        """Return an adapter of this model, which requests cannot choose yet."""
        return replace(self, name=name, root=uri, parent=self.name, adapter_id=adapter_id)

    def check_generates(self) -> None:
        """Raise ``InvalidRequest`` if the model only embeds."""
        if self.embedding_only:
            raise InvalidRequest(
                f"{self.name!r} has no output head: it computes embeddings, at {contract.PATH_EMBEDDINGS}, and does not "
                "generate text",
                param="model",
                code="model_not_generative",
            )

    def make_embedding_spec(self) -> PoolingSpec:
        """Return the pooling of embeddings. Raises ``InvalidRequest`` if the model's own is not supported."""
        return self.embedding.make_pooling_spec()

    def make_sampling_spec(
        self, body: SamplingFields, *, logprobs: int | None = None, prompt_logprobs: int | None = None
    ) -> SamplingSpec:
        """Take each parameter from ``body``, else from the model's recommendation, else the one that restricts nothing.

        Raises ``InvalidRequest`` for token ids outside of the vocabulary.
        """
        top_k = _first(body.top_k, self.defaults.top_k, 0)
        limit = body.max_output_tokens
        return SamplingSpec(
            max_tokens=0 if limit is None else max(1, limit),
            seed=secrets.randbits(62) if body.seed is None else body.seed,
            temperature=_first(body.temperature, self.defaults.temperature, 1.0),
            top_k=max(0, int(top_k)),
            top_p=_first(body.top_p, self.defaults.top_p, 1.0),
            min_p=_first(body.min_p, self.defaults.min_p, 0.0),
            ignore_eos=bool(body.ignore_eos),
            stop_token_ids=self._check_token_ids("stop_token_ids", body.stop_token_ids),
            min_tokens=body.min_tokens or 0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            logit_bias=self._logit_bias(body),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            allowed_token_ids=self._check_token_ids("allowed_token_ids", body.allowed_token_ids),
        )

    def _check_token_ids(self, param: str, token_ids: list[int] | None) -> tuple[int, ...]:
        if not token_ids:
            return ()
        if (largest := max(token_ids)) >= self.vocab_size:
            raise InvalidRequest(
                f"'{param}': token id {largest} is not in the model's vocabulary (0 to {self.vocab_size - 1})",
                param=param,
            )
        return tuple(token_ids)

    def _logit_bias(self, body: SamplingFields) -> tuple[tuple[int, float], ...]:
        """Return the biases in the order of their token ids, so that equal requests compare equal."""
        return tuple(
            sorted((self._parse_token_id(key), bias) for key, bias in (body.logit_bias or {}).items())
        )

    def _parse_token_id(self, key: str) -> int:
        token_id = int(key) if _TOKEN_ID.fullmatch(key) else self.vocab_size
        if token_id >= self.vocab_size:
            raise InvalidRequest(
                f"'logit_bias' maps token ids from 0 to {self.vocab_size - 1}, written as strings, to biases; "
                f"{key[:_MAX_SHOWN_CHARACTERS]!r} is not such an id",
                param="logit_bias",
            )
        return token_id


def make_text_options(body: SamplingFields) -> TextOptions:
    """Return the fields of ``body`` that the detokenizer needs."""
    return TextOptions(
        stop=tuple(body.stop or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        return_token_ids=bool(body.return_token_ids),
    )


_NO_PROMPT_OPTIONS: Final = PromptOptions()


def make_prompt_options(body: SamplingFields) -> PromptOptions:
    """Return the fields of ``body`` that the tokenizer needs."""
    if body.add_special_tokens is None and body.truncate_prompt_tokens is None and not body.bad_words:
        return _NO_PROMPT_OPTIONS
    return PromptOptions(
        add_special_tokens=body.add_special_tokens,
        truncate_prompt_tokens=body.truncate_prompt_tokens or 0,
        bad_words=tuple(body.bad_words or ()),
    )


def _fingerprint(launch: Launch) -> str:
    facts = encode_json([__version__, repr(launch.model), launch.config.public_fields()])
    return "fp_" + hashlib.sha256(facts).hexdigest()[:12]


def _first(requested: float | None, recommended: float | None, otherwise: float) -> float:
    if requested is not None:
        return requested
    return otherwise if recommended is None else recommended
