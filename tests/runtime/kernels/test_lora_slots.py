"""The kernel that fills LoRA slots by a table, against the same entries filled one by one on the host."""

import numpy as np
import pytest
import torch
from kernel_device import DEVICE, HALF, noise

from skiff_runtime.kernels.lora_slots import (
    MAX_DATA_BYTES,
    MAX_ENTRIES,
    TABLE_DTYPE,
    HostBuffer,
    SlotEntry,
    allocate_host_buffer,
    count_buffer_bytes,
    fill_slot,
    make_table,
)
from skiff_runtime.kernels.triton.lora.fill_slot import fill_slot as launch_kernel

SLOTS = 3


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_kernel_fills_what_the_host_fills(dtype: torch.dtype) -> None:
    """Every source type, shards of rows and of columns, numbers for a whole part, ranks; and nothing else."""
    memories = [noise(SLOTS, 40, 96, dtype=dtype, seed=1), noise(SLOTS, 70, 16, dtype=dtype, seed=2)]
    ranks = torch.zeros((SLOTS, 1, 1), dtype=torch.int32, device=DEVICE)
    sources = [
        noise(8, 48, dtype=torch.float32, seed=3).cpu(),
        noise(20, 200, dtype=torch.float16, seed=4).cpu(),
        noise(33, 8, dtype=torch.bfloat16, seed=5).cpu(),
    ]
    data = b"".join(each.view(torch.uint8).numpy().tobytes() for each in sources)
    second, third = sources[0].nbytes, sources[0].nbytes + sources[1].nbytes
    entries = [
        SlotEntry(memories[0][:, :20, 48:], 8, 48, 1.0, torch.float32, 0, 48),
        SlotEntry(memories[0][:, 20:], 15, 96, 0.75, torch.float16, second + (5 * 200 + 100) * 2, 200),
        SlotEntry(memories[1][:, 30:], 33, 8, -2.5, torch.bfloat16, third, 8),
        SlotEntry(memories[1][:, :30], 30, 16, 0.0),
        SlotEntry(ranks, 1, 1, 13.0),
    ]
    expected = [each.cpu().clone() for each in (*memories, ranks)]
    copies = [each.clone() for each in expected]
    on_host = [
        each._replace(memory=copy)
        for each, copy in zip(
            entries,
            (copies[0][:, :20, 48:], copies[0][:, 20:], copies[1][:, 30:], copies[1][:, :30], copies[2]),
            strict=True,
        )
    ]
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    fill_slot(1, HostBuffer(values, tuple(on_host), 0), torch.empty(0), dtype)
    assert any(not torch.equal(a, b) for a, b in zip(copies, expected, strict=True))

    offset = -(-len(data) // 16) * 16
    table = make_table(entries).view(np.uint8).tobytes()
    buffer = torch.frombuffer(bytearray(data.ljust(offset, b"\0") + table), dtype=torch.uint8).to(DEVICE)
    launch_kernel(1, buffer, offset, len(entries), dtype)
    for found, wanted in zip((*memories, ranks), copies, strict=True):
        assert torch.equal(found.cpu(), wanted)


def test_full_buffer_has_the_size_that_is_pinned_once() -> None:
    assert MAX_DATA_BYTES + MAX_ENTRIES * TABLE_DTYPE.itemsize <= count_buffer_bytes(0)
    assert count_buffer_bytes(MAX_DATA_BYTES) == count_buffer_bytes(0)
    assert len(allocate_host_buffer(100, torch.device("cpu"))) == 100
