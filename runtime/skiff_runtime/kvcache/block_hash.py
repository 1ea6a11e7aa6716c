"""Names of KV cache blocks: a hash of a block's tokens, chained with the name of the block before it.

The hash depends on nothing but token ids and salt, so that every process and machine gives a block the same name.
"""

import hashlib
from typing import Final

from skiff_runtime.kvcache.prefix_cache import Int32

_HASH_BYTES: Final = 8
_TOKEN_DTYPE: Final = "<i4"


def hash_blocks(tokens: Int32, block_size: int, *, parent: int | None, salt: bytes = b"") -> list[int]:
    """Return the 64-bit hashes of the blocks of ``tokens`` int32[n * block_size], in their order.

    ``parent``: hash of the block before the first one; None at the start of a sequence, where ``salt`` takes its place.
    """
    data = memoryview(tokens.astype(_TOKEN_DTYPE, copy=False).tobytes())
    step = block_size * 4
    before = b"salt" + salt if parent is None else parent.to_bytes(_HASH_BYTES, "little")
    hashes = []
    for start in range(0, len(data), step):
        state = hashlib.sha256(before)
        state.update(data[start : start + step])
        before = state.digest()[:_HASH_BYTES]
        hashes.append(int.from_bytes(before, "little"))
    return hashes
