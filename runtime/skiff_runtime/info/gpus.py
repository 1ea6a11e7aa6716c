"""Memory of common GPUs, as their drivers report it."""

from dataclasses import dataclass
from typing import Final

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU, or an amount of memory that has no name."""

    name: str
    memory_bytes: int


GPUS: Final = tuple(
    Gpu(name, mib * MIB)
    for name, mib in (
        ("B200", 183_359),
        ("H200", 143_771),
        ("H100", 81_559),
        ("H20", 97_871),
        ("A100-80", 81_920),
        ("A100-40", 40_960),
        ("A6000", 49_140),
        ("L40S", 46_068),
        ("RTX4090", 24_564),
        ("L4", 23_034),
        ("A10", 23_028),
    )
)
