"""Library internals that the runtime uses: present in the installed versions, and refused by name if changed."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from skiff_runtime.internals import missing_internals

BORROWERS = {
    "uvicorn": ("skiff_runtime.api.http.uvicorn_internals",),
    "torch": ("skiff_runtime.kernels.torch_internals", "skiff_runtime.distributed.symmetric_memory"),
    "triton": ("skiff_runtime.kernels.triton_internals",),
    "flashinfer": ("skiff_runtime.kernels.flashinfer_internals",),
    "transformers": ("skiff_runtime.conversion.transformers_internals",),
}
INSTALLED = {library: borrowers for library, borrowers in BORROWERS.items() if find_spec(library)}
INTERNALS = [
    pytest.param(library, borrower, name, id=name)
    for library, borrowers in INSTALLED.items()
    for borrower in borrowers
    for name in import_module(borrower).NEEDED
]
# Each entry changes one library as a later release might.
CHANGES = {
    "gone": (
        "uvicorn",
        "import uvicorn.protocols.http.httptools_impl as m; del m.RequestResponseCycle",
        "RequestResponseCycle",
    ),
    "moved": (
        "uvicorn",
        "import sys; sys.modules['uvicorn.protocols.http.httptools_impl'] = None",
        "uvicorn.protocols.http.httptools_impl",
    ),
    "without an attribute": (
        "uvicorn",
        "import uvicorn.protocols.http.httptools_impl as m; m.RequestResponseCycle.__init__ = lambda self: None",
        "httptools_impl:RequestResponseCycle chunked_encoding",
    ),
    "without a parameter": (
        "triton",
        "import triton.runtime.build as m; m._build = lambda name, src, srcdir: src",
        "triton.runtime.build:_build ccflags",
    ),
    "without an attribute of its instances": (
        "transformers",
        "import transformers.convert_slow_tokenizer as m; m.TikTokenConverter.__init__ = lambda self: None",
        "convert_slow_tokenizer:TikTokenConverter pattern",
    ),
    "gone from torch": ("torch", "import torch; del torch._scaled_mm", "_scaled_mm"),
    "gone from torch's symmetric memory": (
        "torch",
        "import torch.distributed._symmetric_memory as m; del m.rendezvous",
        "torch.distributed._symmetric_memory:rendezvous",
    ),
}


@pytest.mark.parametrize(("library", "borrower", "name"), INTERNALS)
def test_installed_library_has_the_borrowed_internals(library: str, borrower: str, name: str) -> None:
    needed = import_module(borrower).NEEDED
    assert missing_internals({name: needed[name]}) == [], f"{borrower} borrows it from {library}"


@pytest.mark.parametrize(("library", "change", "lacked"), CHANGES.values(), ids=CHANGES)
def test_changed_library_is_refused_by_name_and_version(library: str, change: str, lacked: str) -> None:
    code = f"{change}\nimport {', '.join(BORROWERS[library])}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    error = done.stderr.splitlines()[-1]
    assert error.startswith(f"skiff_runtime.errors.ConfigError: {library} {version(library)} does not fit"), (
        done.stderr
    )
    assert lacked in error
    bounded_by = "torch" if library == "triton" else library
    assert f"tested with {bounded_by}" in error


def test_missing_library_raises_module_not_found() -> None:
    code = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name=name)

sys.meta_path.insert(0, Absent())
import skiff_runtime.api.http.uvicorn_internals
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "ModuleNotFoundError" in done.stderr.splitlines()[-1]


def test_profiler_settings_work_with_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.6, which CPU images may have, cannot choose the threads of a profile."""

    class Older:
        def __init__(self, verbose: bool = False) -> None:
            """Take ``verbose`` alone."""

    borrower = import_module(BORROWERS["torch"][0])
    monkeypatch.setattr(borrower, "_ExperimentalConfig", Older)
    assert isinstance(borrower.profiler_settings(all_threads=True), Older)
