"""Launcher cache: Triton's host code, compiled without a GPU, for its driver and for each launch signature.

Otherwise every start would compile it, one library after another, and an image would have to contain a C compiler.
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
"""The driver's library, to which this code is linked; a machine with a GPU has it."""


def build_launchers(launched: Sequence[LaunchSignature]) -> None:
    """Compile the launchers of these kernels into Triton's cache, where they are missing; needs ``stub_libcuda``.

    Raises ``ConfigError`` if they cannot be compiled.
    """
    with _explain_compiler_errors():
        driver.CudaUtils()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda each: driver.CudaLauncher(*each), launched))


@contextmanager
def stub_libcuda() -> Iterator[None]:
    """Let Triton link to a stub of libcuda, and keep it from loading the compiled code, which the stub could not run.

    Raises ``ConfigError`` if there is no C compiler.
    """
    internals: Any = (driver, "library_dirs"), (build, "_load_module_from_path")
    before = [getattr(*each) for each in internals]
    with TemporaryDirectory() as folder:
        with _explain_compiler_errors():
            _compile_stub(Path(folder))
        driver.library_dirs = lambda: [folder]
        build._load_module_from_path = lambda *_: _Unloaded()
        try:
            yield
        finally:
            for (module, name), value in zip(internals, before, strict=True):
                setattr(module, name, value)


def _compile_stub(folder: Path) -> None:
    """Compile a library with all driver functions' names; a linker may drop one that defines no needed symbol."""
    header = Path(driver.dirname, "include", "cuda.h").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w*", header)))
    source = folder / "functions.c"
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    made = build._build("functions", str(source), str(folder), [], [], [], [f"-Wl,-soname,{LIBCUDA}"])
    Path(made).rename(folder / LIBCUDA)


@contextmanager
def _explain_compiler_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"the launchers of Triton's kernels cannot be compiled ({error}); this needs a C compiler ($CC, gcc or "
            "clang) and Python's headers, such as Debian's gcc and python3-dev"
        ) from None


class _Unloaded:
    """Stands for a compiled module, none of whose functions is called."""

    def __getattr__(self, _name: str) -> None:
        return None
