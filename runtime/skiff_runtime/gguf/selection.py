"""The choice of one GGUF file: repositories often hold the same model in many quantizations."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.header import SUFFIX

_VARIANTS: Final = ("ud", "i1")
"""Marks of other mixtures of types under a quantization's name: Unsloth's dynamic ones, and those with an importance
matrix."""


def find_gguf(path: Path) -> Path:
    """Return the GGUF file of a directory whose only weights it is; else ``path`` itself.

    Raises ``ModelError`` if the directory holds several and no safetensors.
    """
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return path
    names = sorted(file.name for file in path.glob(f"*{SUFFIX}"))
    if len(names) > 1:
        raise ModelError(
            f"{path} holds {len(names)} GGUF files; --model takes one of them: {', '.join(names)}"
        )
    return path / names[0] if names else path


def select_by_quant_type(names: Sequence[str], quant_type: str) -> list[str]:
    """Return the GGUF files among ``names`` that end with ``quant_type``, such as Q4_K_M, in any case.

    The shortest comes alone if all others have its name with a variant before the quantization: of ``model-Q4_K_M`` and
    ``model-UD-Q4_K_M``, the first has the quantization ``Q4_K_M``, and the second one of its own.
    An empty ``quant_type`` matches every GGUF file.
    """
    found = [name for name in names if name.endswith(SUFFIX)]
    if not quant_type:
        return found
    ending = f"{quant_type}{SUFFIX}".lower()
    found = [
        name
        for name in found
        if name.lower() == ending or name.lower().endswith((f"-{ending}", f".{ending}"))
    ]
    if not found:
        return []
    shortest = min(found, key=len)
    model = shortest[: -len(ending)].lower()
    variants = {f"{model}{variant}-{ending}" for variant in _VARIANTS}
    return [shortest] if all(name == shortest or name.lower() in variants for name in found) else found
