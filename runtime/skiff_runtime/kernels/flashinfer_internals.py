"""FlashInfer's undocumented interfaces for compiling kernels: directories, names and modules.

No other module imports from ``flashinfer.jit`` or ``flashinfer.utils``. Must be imported after
``kernels.kernel_cache.activate``.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from skiff_runtime.internals import Shape, borrowed

__all__ = [
    "call_after_builds",
    "determine_attention_backend",
    "device_support_pdl",
    "environment",
    "gen_batch_prefill_module",
    "get_batch_prefill_uri",
]

_PREFILL = (
    "backend",
    "dtype_q",
    "dtype_kv",
    "dtype_o",
    "dtype_idx",
    "head_dim_qk",
    "head_dim_vo",
    "pos_encoding_mode",
    "use_sliding_window",
    "use_logits_soft_cap",
    "use_fp16_qk_reduction",
)
NEEDED: Final[Shape] = {
    "flashinfer.jit.env": ("FLASHINFER_AOT_DIR", "FLASHINFER_CACHE_DIR", "FLASHINFER_JIT_DIR"),
    "flashinfer.jit:gen_batch_prefill_module": _PREFILL,
    "flashinfer.jit.core:JitSpec": ("build", "is_aot", "jit_library_path"),
    "flashinfer.jit.core:JitSpec.build": ("verbose", "need_lock"),
    "flashinfer.jit.attention.modules:get_batch_prefill_uri": _PREFILL,
    "flashinfer.utils:determine_attention_backend": (
        "device",
        "pos_encoding_mode",
        "use_fp16_qk_reductions",
        "use_custom_mask",
        "dtype_q",
        "dtype_kv",
    ),
    "flashinfer.utils:device_support_pdl": ("device",),
}

with borrowed("flashinfer-python", NEEDED):
    from flashinfer.jit import env as environment
    from flashinfer.jit import gen_batch_prefill_module
    from flashinfer.jit.attention.modules import get_batch_prefill_uri
    from flashinfer.jit.core import JitSpec
    from flashinfer.utils import determine_attention_backend, device_support_pdl


def _find_ninja() -> None:
    """Let FlashInfer, which runs ``ninja`` by its name, find the one that pip has installed beside the interpreter.

    That directory is not in PATH if a virtual environment is used without being activated.
    """
    directory, path = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
    if directory not in path.split(os.pathsep):
        os.environ["PATH"] = f"{path}{os.pathsep}{directory}"


_find_ninja()


def call_after_builds(callback: Callable[[Path], None]) -> None:
    """Call ``callback`` with the library of each module that this process builds from now on, before it is loaded.

    FlashInfer builds a module while it holds its lock, so the library is complete and no other process writes to it.
    """
    build = JitSpec.build

    def build_and_report(spec: Any, *arguments: Any, **options: Any) -> None:
        build(spec, *arguments, **options)
        callback(spec.jit_library_path)

    JitSpec.build = build_and_report
