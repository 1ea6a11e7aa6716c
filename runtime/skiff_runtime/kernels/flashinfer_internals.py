"""FlashInfer's undocumented interfaces for compiling kernels: directories, names and modules.

No other module imports from ``flashinfer.jit`` or ``flashinfer.utils``. Must be imported after
``kernels.kernel_cache.activate``.
"""

from typing import Final

from skiff_runtime.internals import Shape, borrowed

__all__ = [
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
    from flashinfer.utils import determine_attention_backend, device_support_pdl
