"""Records the steps of an engine that read a prefix once for several rows."""

from typing import Any

import pytest

from skiff_runtime.engine import shared_prefix


def record_shared_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Share prefixes from now on, however little that saves; return the row counts of the steps that do."""
    recorded: list[int] = []
    pack_work_items = shared_prefix.pack_work_items

    def record(*arguments: Any, **options: Any) -> Any:
        recorded.append(options["rows"])
        return pack_work_items(*arguments, **options)

    monkeypatch.setattr(shared_prefix, "MIN_SAVED_TOKENS", 0)
    monkeypatch.setattr(shared_prefix, "pack_work_items", record)
    return recorded
