"""The directory of compiled GPU kernels, Triton's and FlashInfer's, filled when an image is built or at first use.

Like every compiler's cache it is keyed by sources, versions and architecture, so a stale entry is never used. Several
pods may share it, so an entry appears whole or not at all: Triton renames each file into place, and a module of
FlashInfer, which a linker writes in place, is built in a private directory and then published by a rename.
"""

import contextlib
import os
import shutil
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from skiff_runtime import log

PREBUILT_DIRECTORY: Final = Path("/opt/skiff-kernels")
"""Kernels that were compiled into the image (``images/runtime.Dockerfile``)."""
TRITON_FOLDER: Final = "triton"
FLASHINFER_FOLDER: Final = "flashinfer"
_TRITON_VARIABLE: Final = "TRITON_CACHE_DIR"
_FLASHINFER_VARIABLE: Final = "FLASHINFER_WORKSPACE_BASE"
_FLASHINFER_SUBFOLDER: Final = Path(".cache") / "flashinfer"
"""Folders that FlashInfer appends to its workspace base."""
_FLASHINFER_KERNELS: Final = "flashinfer_jit_cache"
"""The package of FlashInfer's kernels that were compiled by its authors."""
_directories: Final[list[Path]] = []
"""The active directory, if any."""


def activate(directory: Path, scratch: Path) -> None:
    """Make this process use the kernels in ``directory`` and keep new ones there.

    Where it cannot be written to, as in an image, new kernels go to ``scratch`` and are lost with it. FlashInfer builds
    in ``scratch``, which no other pod shares. A directory on a volume begins with the kernels of the image. Must be
    called before Triton or FlashInfer is imported, because both read their directories from the environment then.
    """
    _directories[:] = [directory]
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        _copy_prebuilt(directory)
    if not os.access(directory, os.W_OK):
        if (directory / TRITON_FOLDER).is_dir():
            shutil.copytree(directory / TRITON_FOLDER, scratch / TRITON_FOLDER, dirs_exist_ok=True)
        directory = scratch
    os.environ[_TRITON_VARIABLE] = str(directory / TRITON_FOLDER)
    os.environ[_FLASHINFER_VARIABLE] = str(scratch / FLASHINFER_FOLDER)


def _copy_prebuilt(directory: Path) -> None:
    """Copy the image's kernels into an empty directory. Ranks and pods that start together do so once: a rename decides."""
    if directory == PREBUILT_DIRECTORY:
        return
    for name in (TRITON_FOLDER, FLASHINFER_FOLDER):
        source, target = PREBUILT_DIRECTORY / name, directory / name
        if not source.is_dir() or target.exists():
            continue
        staging = Path(tempfile.mkdtemp(prefix=f".copying-{name}-", dir=directory))
        try:
            shutil.copytree(source, staging / name, copy_function=shutil.copyfile)
            with contextlib.suppress(OSError):  # another process was first
                (staging / name).rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def may_have_flashinfer_modules() -> bool:
    """Return False if no kernel of FlashInfer is compiled, so that a start need not import it to learn this."""
    if not _directories or find_spec(_FLASHINFER_KERNELS) is not None:
        return True
    package = find_spec(FLASHINFER_FOLDER)
    shipped = [Path(each) / "data" / "aot" for each in (package and package.submodule_search_locations) or ()]
    folders = [*shipped, *(directory / FLASHINFER_FOLDER for directory in _directories)]
    return any(next(folder.rglob("*.so"), None) is not None for folder in folders)


def use_prebuilt_flashinfer_modules() -> None:
    """Make FlashInfer load the compiled modules of the active directory as they are, and keep there what it builds.

    By default it compares the times of sources, which an image does not preserve, and would compile again. Must be
    called once.
    """
    from skiff_runtime.kernels import flashinfer_internals

    environment: Any = flashinfer_internals.environment
    within = environment.FLASHINFER_JIT_DIR.relative_to(environment.FLASHINFER_CACHE_DIR)
    for directory in _directories:
        folder = directory / FLASHINFER_FOLDER / _FLASHINFER_SUBFOLDER / within
        if folder.is_dir():
            environment.FLASHINFER_AOT_DIR = folder
        flashinfer_internals.call_after_builds(partial(publish_module, folder))


def publish_module(folder: Path, library: Path) -> None:
    """Copy a compiled module, ``NAME/NAME.so``, into ``folder``, whole or not at all; the first of several processes wins.

    A published module is never replaced, because on a network file system the processes that have mapped it would lose
    it. Where ``folder`` cannot be written to, do nothing.
    """
    target = folder / library.parent.name
    if (target / library.name).exists():
        return
    staging: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".publishing-", dir=folder))
        copy = staging / target.name / library.name
        copy.parent.mkdir()
        shutil.copyfile(library, copy)
        with copy.open("rb") as stream:
            os.fsync(stream.fileno())  # the name must not outlive the content if the node fails
        copy.parent.rename(target)
    except OSError as error:
        if not (target / library.name).exists():  # else another process was first
            log.event("kernel_module_not_kept", module=target.name, directory=folder, reason=str(error))
    finally:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
