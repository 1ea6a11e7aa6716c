"""The inputs of a turn as rank 0 sends them to the other ranks.

Many requests may have the same compiled grammar, of up to 32 MiB: a request for ``n`` choices alone has ``n`` copies. So the
message has each grammar once, and its requests have the key alone.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from skiff_runtime.messages import CompiledGrammar, GenerateRequest, RankInputs, WatchCache
from skiff_runtime.scheduler.channel import SchedulerInput


def pack_inputs(
    items: Sequence[SchedulerInput], held: Iterable[CompiledGrammar], checksum: int
) -> RankInputs:
    """Return the message for ``items``. ``held``: grammars of requests that rank 0 holds back until they are loaded."""
    grammars = {each.key: each for each in held}
    for item in items:
        if isinstance(item, GenerateRequest) and item.grammar is not None:
            grammars.setdefault(item.grammar.key, item.grammar)
    shared = [
        replace(item, grammar=CompiledGrammar(item.grammar.key, b""))
        if isinstance(item, GenerateRequest) and item.grammar is not None
        else item
        for item in items
        if not isinstance(item, WatchCache)  # all caches are alike, and rank 0 alone reports its own
    ]
    return RankInputs(items=shared, checksum=checksum, grammars=list(grammars.values()))


def unpack_items(inputs: RankInputs) -> list[SchedulerInput]:
    """Return the items of ``pack_inputs``, each request with its whole grammar."""
    grammars = {each.key: each for each in inputs.grammars}
    return [
        replace(item, grammar=grammars[item.grammar.key])
        if isinstance(item, GenerateRequest) and item.grammar is not None
        else item
        for item in inputs.items
    ]
