"""Where compiled GPU kernels are kept, by Triton and by FlashInfer: filled when an image is built, or at first use.

Like every cache of a compiler it is keyed by sources, versions and architecture: what is stale is not used.
"""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, Final

TRITON_FOLDER: Final = "triton"
FLASHINFER_FOLDER: Final = "flashinfer"
_TRITON_VARIABLE: Final = "TRITON_CACHE_DIR"
_FLASHINFER_VARIABLE: Final = "FLASHINFER_WORKSPACE_BASE"
_OF_FLASHINFER: Final = Path(".cache") / "flashinfer"
"""What FlashInfer adds to its workspace base."""
_directories: Final[list[Path]] = []
"""What was activated, if anything."""


def activate(directory: Path, scratch: Path) -> None:
    """Let this process use the kernels in ``directory``, and keep new ones there.

    Where it cannot be written to, as in an image, new ones go to ``scratch``, which is lost. To be called before
    Triton or FlashInfer is imported.
    """
    _directories[:] = [directory]
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
    if not os.access(directory, os.W_OK):
        if (directory / TRITON_FOLDER).is_dir():
            shutil.copytree(directory / TRITON_FOLDER, scratch / TRITON_FOLDER, dirs_exist_ok=True)
        directory = scratch
    os.environ[_TRITON_VARIABLE] = str(directory / TRITON_FOLDER)
    os.environ[_FLASHINFER_VARIABLE] = str(directory / FLASHINFER_FOLDER)


def use_prebuilt_flashinfer_modules() -> None:
    """Let FlashInfer load what is compiled as it is; else it would compare times of sources, and compile again."""
    from skiff_runtime.kernels import flashinfer_internals

    environment: Any = flashinfer_internals.environment
    within = environment.FLASHINFER_JIT_DIR.relative_to(environment.FLASHINFER_CACHE_DIR)
    for directory in _directories:
        folder = directory / FLASHINFER_FOLDER / _OF_FLASHINFER / within
        if folder.is_dir():
            environment.FLASHINFER_AOT_DIR = folder
