"""The prompt of a request, with its blocks named as the pods of its model name them."""

import hashlib

from skiff_router.endpoints import Backend
from skiff_router.pod_state import Prompt
from skiff_runtime.api.http.auth import derive_cache_namespace
from skiff_runtime.prompt_blocks import DEFAULT_BYTES_PER_TOKEN, PromptFields, adapter_namespace, hash_prompt


def read_prompt(
    fields: PromptFields, backend: Backend, key: bytes, *, adapter: str = "", with_blocks: bool
) -> Prompt:
    """Return the prompt of a body. ``key``: the API key that pods will see, b"" for none; ``adapter``: LoRA adapter, if any."""
    text = fields.prompt_text()
    isolates, bytes_per_token = False, DEFAULT_BYTES_PER_TOKEN
    for endpoint in backend.endpoints:
        load = endpoint.pod.load
        if load is None:
            continue
        isolates = endpoint.pod.isolates_keys
        if load.bytes_per_token:
            bytes_per_token = load.bytes_per_token
            break  # the pods of a model have its tokenizer, and one configuration
    if not with_blocks:
        return Prompt((), len(text), bytes_per_token)
    digest = hashlib.sha256(key).digest() if isolates and key else b""
    namespace = adapter_namespace(derive_cache_namespace(digest, fields.salt()), adapter)
    blocks = hash_prompt(text, namespace)
    return Prompt(blocks.names(), len(text), bytes_per_token)
