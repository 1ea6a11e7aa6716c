"""Former names of the configuration's fields, which are refused with a message that gives the new name."""

from typing import Final

RENAMED_FIELDS: Final = {
    "admin_key": "admin_api_key",
    "admin_key_file": "admin_api_key_file",
    "allowed_host": "allowed_hosts",
    "attention": "attention_backend",
    "cache": "disable_radix_cache",
    "cache_dir": "download_dir",
    "cors_origin": "allowed_origins",
    "disable_cuda_graphs": "disable_cuda_graph",
    "disable_overlap": "disable_overlap_schedule",
    "disable_shared_decode": "disable_cascade_attn",
    "kv_cache_tokens": "max_total_tokens",
    "max_batch_tokens": "max_num_batched_tokens",
    "memory_fraction": "mem_fraction_static",
    "otlp_endpoint": "otlp_traces_endpoint",
    "queue_order": "schedule_policy",
    "step_timeout_seconds": "watchdog_timeout",
    "tokenizers": "tokenizer_worker_num",
    "tool_parser": "tool_call_parser",
    "tp": "tp_size",
}
"""By the former name. ``--tp`` and ``SKIFF_TP`` go on to set ``tp_size``; only ``LLM(tp=...)`` is refused."""
