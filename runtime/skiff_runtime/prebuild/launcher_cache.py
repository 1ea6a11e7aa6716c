"""Triton's own host code, compiled where there is no GPU: for its driver, and for each signature that kernels are launched with.

A start would otherwise compile it, one library after another, and an image would have to hold a C compiler.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from skiff_runtime.errors import ConfigError
from skiff_runtime.kernels.triton_internals import build
from skiff_runtime.kernels.triton_internals import nvidia_driver as driver
from skiff_runtime.prebuild.offline_driver import LaunchSignature

LIBCUDA: Final = "libcuda.so.1"
"""What such code is linked to by this name, and finds on a machine that has a GPU."""


def build_launchers(launched: Sequence[LaunchSignature]) -> None:
    """Put what launches these kernels into Triton's cache, where it is missing, ``stub_libcuda``.

    Raises ``ConfigError`` where it cannot be compiled.
    """
    with _explained():
        driver.CudaUtils()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda each: driver.CudaLauncher(*each), launched))


@contextmanager
def stub_libcuda() -> Iterator[None]:
    """Let Triton link to a library made for that, and not load what it compiled: only the real one does anything.

    Raises ``ConfigError`` where there is no C compiler.
    """
    internals: Any = (driver, "library_dirs"), (build, "_load_module_from_path")
    before = [getattr(*each) for each in internals]
    with TemporaryDirectory() as folder:
        with _explained():
            _make_libcuda(Path(folder))
        driver.library_dirs = lambda: [folder]
        build._load_module_from_path = lambda *_: _Unloaded()
        try:
            yield
        finally:
            for (module, name), value in zip(internals, before, strict=True):
                setattr(module, name, value)


def _make_libcuda(folder: Path) -> None:
    """A library with the names of the driver's functions: one without them might be left out."""
    header = Path(driver.dirname, "include", "cuda.h").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    source = folder / "functions.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    made = build._build("functions", str(source), str(folder), [], [], [], [f"-Wl,-soname,{LIBCUDA}"])
    Path(made).rename(folder / LIBCUDA)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"what launches Triton's kernels cannot be compiled ({error}); that takes a C compiler ($CC, gcc or clang) and "
            "Python's headers, such as Debian's gcc and python3-dev"
        ) from None


class _Unloaded:
    """A compiled module whose functions nobody calls."""

    def __getattr__(self, _name: str) -> None:
        return None
