"""Records the steps of an engine that read a prefix once for several rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from skiff_runtime.engine import input_batch, shared_prefix
from skiff_runtime.kernels.tuning import Tuning, tuning_for


def record_shared_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Share prefixes from now on, however little that saves; return the row counts of the steps that do."""
    recorded: list[int] = []
    pack_work_items = shared_prefix.pack_work_items

    def record(*arguments: Any, **options: Any) -> Any:
        recorded.append(options["rows"])
        return pack_work_items(*arguments, **options)

    def always_profitable(device: torch.device) -> Tuning:
        tuning = tuning_for(device)
        return replace(tuning, shared_prefix=replace(tuning.shared_prefix, min_saved_tokens=0))

    monkeypatch.setattr(input_batch, "tuning_for", always_profitable)
    monkeypatch.setattr(shared_prefix, "pack_work_items", record)
    return recorded
