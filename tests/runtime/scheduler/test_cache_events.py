"""Events of the prefix cache, from messages to messages: what a router would know agrees with what later prompts hit."""

import numpy as np
from cache_mirror import CacheMirror
from msgspec.structs import replace
from scheduler_bench import EOS, SchedulerBench, generate, load

from skiff_runtime.kvcache.block_hash import hash_blocks
from skiff_runtime.messages import FlushCache, GenerateRequest, KVBlocksStored, WatchCache
from skiff_runtime.prompt_blocks import HASH_DTYPE, PROMPT_BLOCK_BYTES, PromptBlocks
from skiff_runtime.scheduler.request import locate_prompt_blocks

PROMPT = [(7 * i + i // 11) % EOS for i in range(64)]
WATCH = WatchCache(prompts=True, blocks=True)


class WatchedBench(SchedulerBench):
    """A scheduler whose events are applied to a mirror."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.mirror = CacheMirror()

    def turn(self) -> bool:
        runs_on = self.scheduler.turn()
        for batch in self.channel.sent:
            self.mirror.apply(batch.cache_events)
            self.replies.take(batch)
            self.stats.append(batch.stats)
        self.channel.sent.clear()
        return runs_on


def blocks(*hashes: int, text_bytes: int | None = None) -> PromptBlocks:
    length = len(hashes) * PROMPT_BLOCK_BYTES if text_bytes is None else text_bytes
    return PromptBlocks(np.array(hashes, HASH_DTYPE).tobytes(), length)


def request(uid: int, prompt: list[int], prompt_blocks: PromptBlocks) -> GenerateRequest:
    return replace(generate(uid, prompt), prompt_blocks=prompt_blocks)


def test_prompt_blocks_are_reported_when_their_pages_are_cached() -> None:
    bench = WatchedBench(max_num_batched_tokens=16)
    bench.put(WATCH, request(0, PROMPT, blocks(11, 12, 13, 14)))
    known: list[list[int]] = []
    while not known or not bench.scheduler.is_idle:
        bench.turn()
        known.append(sorted(bench.mirror.prompts))
    # 16 tokens a block, and as many a step; each step reports what the next one, planned already, will have computed.
    assert [each for each in known if each][:4] == [[11], [11, 12], [11, 12, 13], [11, 12, 13, 14]]
    assert bench.mirror.blocks >= set(hash_blocks(np.array(PROMPT, np.int32), 4, parent=None))
    bench.put(FlushCache(1))
    bench.turn()
    assert bench.mirror.prompts == bench.mirror.blocks == set()


def test_blocks_of_an_adapter_are_named_by_its_name_and_not_by_its_number() -> None:
    found: list[list[KVBlocksStored]] = []
    for first_id in (1, 5):
        bench = SchedulerBench(enable_lora=True, max_num_batched_tokens=200)
        bench.put(WATCH, load(first_id, "sql"), load(first_id + 1, "chat"))
        bench.turn()
        bench.turn()
        bench.put(*(generate(uid, PROMPT, adapter_id=uid and first_id + uid - 1) for uid in range(3)))
        events: list[KVBlocksStored] = []
        while not bench.scheduler.is_idle or bench.channel.arriving:
            bench.scheduler.turn()
            for batch in bench.channel.sent:
                changes = batch.cache_events.blocks if batch.cache_events else []
                events += [each for each in changes if isinstance(each, KVBlocksStored)]
            bench.channel.sent.clear()
        found.append(events)
    for events, first_id in zip(found, (1, 5), strict=True):
        by_adapter = {each.adapter_name: each.adapter_id for each in events}
        assert by_adapter == {"": 0, "sql": first_id, "chat": first_id + 1}
    names = [{(each.adapter_name, tuple(each.hashes)) for each in events} for events in found]
    assert names[0] == names[1]
    blocks = [block for each in found[0] for block in each.hashes]
    assert len(set(blocks)) == len(blocks) >= 3 * len(PROMPT) // 4


def test_watcher_that_comes_late_gets_a_snapshot() -> None:
    bench = WatchedBench()
    bench.put(request(0, PROMPT, blocks(11, 12)))
    bench.finish()
    assert bench.mirror.snapshots == 0
    bench.put(WATCH)
    bench.turn()
    assert bench.mirror.snapshots == 1 and bench.mirror.prompts == {11, 12}
    assert len(bench.mirror.blocks) == bench.stats[-1].pages_cached


def test_prompt_whose_pages_were_cached_without_its_blocks_is_reported_too() -> None:
    """The pages of an answer are cached before the next turn of the conversation brings the text."""
    bench = WatchedBench()
    bench.put(WATCH, generate(0, PROMPT))
    bench.finish()
    assert bench.mirror.prompts == set()
    bench.put(request(1, PROMPT, blocks(11, 12)))
    bench.finish()
    assert bench.mirror.prompts == {11, 12}


def test_evicted_prompts_are_removed() -> None:
    bench = WatchedBench(num_pages=32, max_running_requests=2)
    bench.put(WATCH)
    for uid in range(12):
        prompt = [uid, *PROMPT[:40]]
        bench.put(request(uid, prompt, blocks(100 + uid, 200 + uid)))
        bench.finish()
    assert len(bench.mirror.prompts) <= 6 and {111, 211} <= bench.mirror.prompts
    assert not {100, 200} & bench.mirror.prompts


def test_nothing_is_recorded_without_a_watcher() -> None:
    bench = WatchedBench()
    bench.put(request(0, PROMPT, blocks(1)))
    bench.turn()
    assert all(batch.cache_events is None for batch in bench.channel.sent)
    bench.put(WATCH, WatchCache(prompts=False, blocks=False), generate(1, PROMPT))
    bench.finish()
    assert bench.mirror.snapshots == 0


def test_pages_of_blocks_follow_the_length_of_the_text() -> None:
    assert locate_prompt_blocks(blocks(1, 2, text_bytes=3 * PROMPT_BLOCK_BYTES), 96, 16) == ((1, 1), (3, 2))
    assert locate_prompt_blocks(blocks(1, 2), 1, 16) == ((0, 1), (0, 2))
    assert locate_prompt_blocks(None, 96, 16) == locate_prompt_blocks(blocks(), 96, 16) == ()
