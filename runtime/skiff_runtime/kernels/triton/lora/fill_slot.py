"""The copy of an adapter's matrices from a buffer to the layers' LoRA slots, in one launch, by a table."""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.lora_slots import FILL_INT, TABLE_DTYPE

BLOCK: Final = 1024
"""Elements of one loop iteration."""
PROGRAMS_OF_ENTRY: Final = 8
_TYPES: Final = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_FIELDS: Final = TABLE_DTYPE.itemsize // 8
_FILL_INT = tl.constexpr(FILL_INT)


@triton.jit(do_not_specialize=["slot", "table_offset"])
def fill_slot_kernel(
    buffer: tl.tensor,
    slot: tl.tensor,
    table_offset: tl.tensor,
    TYPE: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Fill the target of one entry of the table, in one slot.

    Grid: (entries, programs of an entry). Products with the scale are computed in float32 and rounded once.

    buffer              uint8: values, and from ``table_offset`` on the table, see ``TABLE_DTYPE``
    TYPE                of the slots' matrices
    FIELDS              of a table's entry, 8 bytes each
    """
    entry = (buffer + table_offset).to(tl.pointer_type(tl.int64)) + tl.program_id(0) * FIELDS
    address, row_stride = tl.load(entry), tl.load(entry + 2)
    first = slot.to(tl.int64) * tl.load(entry + 1)
    source, source_stride = buffer + tl.load(entry + 3), tl.load(entry + 4)
    rows, columns = tl.load(entry + 5), tl.load(entry + 6)
    kind = tl.load(entry + 7)
    value = tl.load((entry + 8).to(tl.pointer_type(tl.float64))).to(tl.float32)
    size = (rows * columns).to(tl.int32)
    width = columns.to(tl.int32)
    for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < size
        row, column = (index // width).to(tl.int64), index % width
        read, written = row * source_stride + column, first + row * row_stride + column
        if kind == _FILL_INT:
            target = address.to(tl.pointer_type(tl.int32)) + written
            tl.store(target, tl.zeros((BLOCK,), tl.int32) + value.to(tl.int32), inside)
        else:
            values = tl.zeros((BLOCK,), tl.float32) + value
            if kind == 0:
                values *= tl.load(source.to(tl.pointer_type(tl.float32)) + read, inside, 0.0)
            elif kind == 1:
                values *= tl.load(source.to(tl.pointer_type(tl.float16)) + read, inside, 0.0).to(tl.float32)
            elif kind == 2:
                values *= tl.load(source.to(tl.pointer_type(tl.bfloat16)) + read, inside, 0.0).to(tl.float32)
            tl.store(address.to(tl.pointer_type(TYPE)) + written, values.to(TYPE), inside)


def fill_slot(slot: int, buffer: torch.Tensor, table_offset: int, entries: int, dtype: torch.dtype) -> None:
    """Launch the kernel for ``kernels.lora_slots.fill_slot``, behind the copy of the host's buffer to ``buffer``."""
    fill_slot_kernel[(entries, PROGRAMS_OF_ENTRY)](
        buffer, slot, table_offset, TYPE=_TYPES[dtype], FIELDS=_FIELDS, BLOCK=BLOCK
    )
