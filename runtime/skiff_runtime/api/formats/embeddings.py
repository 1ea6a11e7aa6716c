"""POST /v1/embeddings: from a request body to a ``RequestSpec``, and the formatter of its response."""

import base64
import secrets
from typing import Any, Final

import msgspec

from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.formats.vectors import (
    VectorResponseFormatter,
    format_pooling_usage,
)
from skiff_runtime.api.schemas.pooling_bodies import EmbeddingRequest
from skiff_runtime.api.schemas.validation import parse_body
from skiff_runtime.messages import PromptOptions, SamplingSpec, TextOptions, Usage, Wire
from skiff_runtime.models.embedding_config import Vector, cut_vector
from skiff_runtime.sse import encode_json

NO_SAMPLING: Final = SamplingSpec(max_tokens=0, seed=0)


def prepare_embeddings(raw: bytes, model: ServedModel) -> RequestSpec:
    """Validate a request body. Raises ``RequestError``."""
    body = parse_body(EmbeddingRequest, raw, strict=model.is_strict)
    model = model.choose(body.model)
    pooling = model.make_embedding_spec()
    embedding = model.embedding
    size = embedding.check_dimensions(body.dimensions)
    return RequestSpec(
        prompts=[embedding.add_prompt(each, body.prompt_name) for each in body.input],
        sampling=NO_SAMPLING,
        text=TextOptions(),
        formatter=EmbeddingResponseFormatter(
            model.name,
            size=size,
            normalize=embedding.normalize if body.normalize is None else body.normalize,
            is_base64=body.encoding_format == "base64",
        ),
        stream=False,
        priority=body.priority or 0,
        user=body.user,
        cache_salt=body.cache_salt,
        adapter_id=model.adapter_id,
        pooling=pooling,
        prompt_options=PromptOptions(add_special_tokens=body.add_special_tokens),
    )


class EmbeddingResponseFormatter(VectorResponseFormatter):
    """Writes one response, in OpenAI's shape. A vector is cut to ``size`` before it is normalized."""

    def __init__(self, model: str, *, size: int, normalize: bool, is_base64: bool) -> None:
        self.id = f"embd-{secrets.token_hex(12)}"
        self._model = model
        self._size = size
        self._normalize = normalize
        self._is_base64 = is_base64

    def format_vector(self, index: int, vector: Vector) -> dict[str, Any]:
        vector = cut_vector(vector, self._size, normalize=self._normalize)
        # Written now, while other vectors are computed: at the end, thousands of them would delay all streams.
        if self._is_base64:
            data = base64.b64encode(vector.astype(Wire.VECTOR, copy=False).tobytes()).decode()
            return {"object": "embedding", "index": index, "embedding": msgspec.Raw(encode_json(data))}
        return {"object": "embedding", "index": index, "embedding": msgspec.Raw(encode_json(vector.tolist()))}

    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        return encode_json(
            {
                "object": "list",
                "data": choices,
                "model": self._model,
                "usage": format_pooling_usage(usage),
            }
        )
