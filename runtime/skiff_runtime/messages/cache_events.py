"""Messages about the content of the prefix cache, from rank 0 to the api, for routers."""

from msgspec import Struct


class WatchCache(Struct, frozen=True, tag="watch_cache", array_like=True):
    """api -> tokenizer -> rank 0: report changes of the prefix cache with each step, after a snapshot.

    ``prompts``: of prompt blocks; ``blocks``: of KV blocks. Without either, nothing is recorded any more. ``tokens``: KV
    blocks are reported with their tokens.
    """

    prompts: bool
    blocks: bool
    tokens: bool = False


class KVBlocksStored(Struct, frozen=True, array_like=True, tag="stored"):
    """KV blocks entered the cache: consecutive ones, behind the block ``parent``, which is None at a sequence's start.

    ``token_ids``: bytes of ``Wire.TOKEN``, those of all blocks in turn; b"" unless they are watched. ``adapter_id`` and
    ``adapter_name``: of the LoRA adapter that computed them, 0 and "" for the base model.
    """

    hashes: list[int]
    parent: int | None
    token_ids: bytes = b""
    adapter_id: int = 0
    adapter_name: str = ""


class KVBlocksRemoved(Struct, frozen=True, array_like=True, tag="removed"):
    """KV blocks left the cache."""

    hashes: list[int]


class CacheEvents(Struct, frozen=True, array_like=True):
    """Changes of the prefix cache. ``prompts_stored`` and ``prompts_removed``: bytes of ``prompt_blocks.HASH_DTYPE``.

    ``is_snapshot``: they replace everything that was reported before. Within one message no prompt block occurs twice.
    """

    is_snapshot: bool
    prompts_stored: bytes
    prompts_removed: bytes
    blocks: list[KVBlocksStored | KVBlocksRemoved]
