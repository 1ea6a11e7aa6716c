"""Whether an engine's steps read prefixes once for several rows."""

from typing import Any

import pytest

from skiff_runtime.engine import shared_prefix as sharing


def note_cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """However little it saves, let prefixes be shared from now on; the rows of each step in which they are."""
    noted: list[int] = []
    cut = sharing.cut

    def noting(*arguments: Any, **options: Any) -> Any:
        noted.append(options["rows"])
        return cut(*arguments, **options)

    monkeypatch.setattr(sharing, "MIN_SAVED_TOKENS", 0)
    monkeypatch.setattr(sharing, "cut", noting)
    return noted
