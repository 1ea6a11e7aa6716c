"""Filling of LoRA slots with an adapter's matrices from host memory, on any device.

An adapter has hundreds of small matrices, so neither the host nor the device handles them one by one on a GPU: they lie in
large buffers as they were read from the file, each with a table of what belongs where. A slot is filled by one copy and
one launch for each buffer, on the current stream, and the host does not wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

HOST_BUFFER_BYTES: Final = 1 << 22
"""Bytes of a buffer, unless one matrix has more. A power of two, to which PyTorch rounds up allocations of pinned memory;
and one size, so that each adapter gets the buffers of one that is gone."""
MAX_ENTRIES: Final = 3584
"""Entries of a buffer, whose table takes a sixteenth of it at most."""
MAX_DATA_BYTES: Final = HOST_BUFFER_BYTES - HOST_BUFFER_BYTES // 16
"""Bytes that leave room for the table in a buffer of the usual size."""
TABLE_DTYPE: Final = np.dtype(
    [
        ("target", np.int64),
        ("slot_stride", np.int64),
        ("row_stride", np.int64),
        ("offset", np.int64),
        ("source_stride", np.int64),
        ("rows", np.int64),
        ("columns", np.int64),
        ("kind", np.int64),
        ("value", np.float64),
    ]
)
"""An entry of a table: the address of the target in slot 0, strides in elements, and the offset of the source in bytes."""
SOURCE_KINDS: Final = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FILL: Final = 3
"""The kind of an entry without a source: ``value`` for all elements of the slots' type."""
FILL_INT: Final = 4
"""The same for int32."""


class SlotMatrix(NamedTuple):
    """The memory of one matrix in all LoRA slots: [slots, rows, columns]. The columns of a row are contiguous.

    A rank may hold a shard of the matrix. The shard begins at ``first_row`` and ``first_column`` of the whole matrix.
    """

    memory: torch.Tensor
    first_row: int = 0
    first_column: int = 0


class SlotEntry(NamedTuple):
    """The first ``rows`` and ``columns`` of a matrix in a slot, and their new values.

    They are those at ``offset`` (bytes) of the buffer, of type ``dtype`` and with rows ``stride`` elements apart, times ``value``;
    or, where ``dtype`` is None, ``value`` itself.
    """

    memory: torch.Tensor
    rows: int
    columns: int
    value: float
    dtype: torch.dtype | None = None
    offset: int = 0
    stride: int = 0


@dataclass(frozen=True, slots=True)
class HostBuffer:
    """Values in host memory, pinned for a GPU: uint8 [bytes], with the entries that they fill.

    ``table_offset``: that of the table of the entries, as ``TABLE_DTYPE``, behind the values; there is none for a CPU.
    """

    data: torch.Tensor
    entries: tuple[SlotEntry, ...]
    table_offset: int


def count_buffer_bytes(num_bytes: int) -> int:
    """Return the size of a buffer for ``num_bytes`` of values and a table."""
    return max(HOST_BUFFER_BYTES, _align(num_bytes) + MAX_ENTRIES * TABLE_DTYPE.itemsize)


def allocate_host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 with room for ``num_bytes`` of values and a table, pinned for a ``device`` that is a GPU."""
    size = count_buffer_bytes(num_bytes) if device.type == "cuda" else num_bytes
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


def make_host_buffer(
    data: torch.Tensor, num_bytes: int, entries: Sequence[SlotEntry], device: torch.device
) -> HostBuffer:
    """Return the buffer of ``data`` from ``allocate_host_buffer``, which begins with ``num_bytes`` of values; add its table."""
    assert len(entries) <= MAX_ENTRIES
    offset = _align(num_bytes)
    if device.type == "cuda":
        table = make_table(entries).view(np.uint8)
        data[offset : offset + len(table)].numpy()[:] = table
    return HostBuffer(data, tuple(entries), offset)


def make_table(entries: Sequence[SlotEntry]) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    """Return the entries as ``TABLE_DTYPE``."""
    rows = []
    for each in entries:
        memory = each.memory
        if each.dtype is not None:
            kind = SOURCE_KINDS[each.dtype]
        else:
            kind = FILL_INT if memory.dtype == torch.int32 else FILL
        slot_stride, row_stride, _ = memory.stride()
        rows.append(
            (
                memory.data_ptr(),
                slot_stride,
                row_stride,
                each.offset,
                each.stride,
                each.rows,
                each.columns,
                kind,
                each.value,
            )
        )
    return np.array(rows, TABLE_DTYPE)


def fill_slot(slot: int, buffer: HostBuffer, staging: torch.Tensor, dtype: torch.dtype) -> None:
    """Fill the entries of a buffer in one slot. ``dtype``: the type of the slots' matrices.

    ``staging``: uint8 on the device, large enough for the buffer; the next call on the stream may use it again. On a GPU the
    host buffer must not be written before the stream has come to this point.
    """
    if staging.device.type == "cuda":
        from skiff_runtime.kernels.triton.lora.fill_slot import fill_slot as kernel

        used = buffer.table_offset + len(buffer.entries) * TABLE_DTYPE.itemsize
        staging[:used].copy_(buffer.data[:used], non_blocking=True)
        kernel(slot, staging, buffer.table_offset, len(buffer.entries), dtype)
        return
    for entry in buffer.entries:
        target = entry.memory[slot, : entry.rows, : entry.columns]
        if entry.dtype is None:
            target.fill_(entry.value)
            continue
        elements = (entry.rows - 1) * entry.stride + entry.columns
        end = entry.offset + elements * entry.dtype.itemsize
        source = buffer.data[entry.offset : end].view(entry.dtype)
        source = source.as_strided((entry.rows, entry.columns), (entry.stride, 1))
        target.copy_(source.float() * entry.value)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
