"""LL words (NCCL's low-latency protocol): numbers that programs of one launch pass to each other without a fence.

An aligned 64-bit word holds a float32 and the mark of the launch. One access moves both, so a word whose mark is right
holds this launch's number: there is no flag and no counter, and nothing is cleared. ``all_reduce.peer_memory`` does the
same between GPUs.

A mark is the epoch of the step and the call id of the layer, so no two launches have the same one while a word may hold
it; epochs begin again after 2^22 steps, with cleared words (``group_tokens_kernel``). Words hold nothing else.
"""

import triton
import triton.language as tl

_CALLS = tl.constexpr(1024)
"""Call ids are below it: ``kernels.lora.MAX_CALL_IDS``."""


@triton.jit
def make_mark(epoch: tl.tensor, call_id: tl.tensor, CACHE: tl.constexpr) -> tl.tensor:
    """Return the mark int32 of this launch, from epoch and call id int32 [1]; ``CACHE`` is the modifier of the load."""
    return tl.load(epoch, cache_modifier=CACHE) * _CALLS + tl.load(call_id)


@triton.jit
def store_words(
    words: tl.tensor,
    index: tl.tensor,
    value: tl.tensor,
    mark: tl.tensor,
    active: tl.tensor,
    PTX: tl.constexpr,
) -> None:
    """Store float32 values with their mark, as LL words, at each active index."""
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred active;
            .reg .b64 address, word;
            setp.ne.b32 active, $5, 0;
            mad.wide.s32 address, $2, 8, $1;
            mov.b64 word, {$3, $4};
            @active st.relaxed.gpu.global.b64 [address], word;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r,r,~{memory}",
            [words, index, value.to(tl.int32, bitcast=True), mark, active.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        low = value.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        tl.store(words + index, low | (mark.to(tl.int64) << 32), active)


@triton.jit
def _load_words(
    words: tl.tensor, index: tl.tensor, mark: tl.tensor, active: tl.tensor, PTX: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Load LL words once: (values, int32 that is 1 where an active word has another mark)."""
    if PTX:
        bits, found = tl.inline_asm_elementwise(
            """{
            .reg .pred active;
            .reg .b64 address, word;
            setp.ne.b32 active, $5, 0;
            mad.wide.s32 address, $3, 8, $2;
            mov.b64 word, {0, $4};
            @active ld.relaxed.gpu.global.b64 word, [address];
            mov.b64 {$0, $1}, word;
            }""",
            "=r,=r,l,r,r,r,~{memory}",
            [words, index, mark, active.to(tl.int32)],
            dtype=(tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load(words + index, active, mark.to(tl.int64) << 32)
        bits, found = word.to(tl.int32), (word >> 32).to(tl.int32)
    return bits.to(tl.float32, bitcast=True), (found != mark).to(tl.int32)


@triton.jit
def receive_words(
    words: tl.tensor, index: tl.tensor, mark: tl.tensor, active: tl.tensor, PTX: tl.constexpr
) -> tl.tensor:
    """Wait until all active words have the mark; return their values, float32, and 0 where one is not active."""
    value, stale = _load_words(words, index, mark, active, PTX)
    while tl.max(stale, None) != 0:
        value, stale = _load_words(words, index, mark, active, PTX)
    return value
