"""The one configuration of a served model, validated once at the edge.

Every field of ``Config`` is a command-line flag (``--max-model-len``) and an
environment variable (``SKIFF_MAX_MODEL_LEN``); ``options.py`` derives both from
the metadata here. Child processes receive the resolved value and trust it.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from skiff_runtime.config.api_keys import check_api_keys
from skiff_runtime.contract import API_PORT
from skiff_runtime.errors import ConfigError

MAX_TENSOR_PARALLEL: Final = 64
MAX_PAGE_SIZE: Final = 1024
AUTO: Final = "auto"

Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["auto", "torch", "triton", "flashinfer", "flashinfer,triton", "triton,flashinfer"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TokenizerBackend = Literal["tokenizers", "fastokens"]
Quantization = Literal["none", "fp8"]


def option(default: Any, group: str, text: str, *, secret: bool = False, flags: tuple[str, ...] = ()) -> Any:
    """Declare one configuration field with its help group and help text.

    A ``secret`` field is never shown. ``flags`` are the spellings of its flag on the command line, the usual one
    first, where the field's name does not give them.
    """
    return field(
        default=default,
        repr=not secret,
        metadata={"group": group, "help": text, "secret": secret, "flags": flags},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything ``skiff serve`` can be told. ``None`` means: derived in ``resolve.py``."""

    model: str = option(
        "demo://",
        "Model",
        "what to serve: a directory, file:///path, hf://org/name, demo://, or shape://name for a benchmark",
    )
    revision: str | None = option(None, "Model", "revision of an hf:// model (default: main)")
    download_dir: str | None = option(
        None, "Model", "where hf:// models are kept (default: $HF_HUB_CACHE, or ~/.cache/huggingface/hub)"
    )
    served_model_name: str | None = option(
        None, "Model", "the model's name in the API (default: the last part of --model)"
    )
    load_format: Literal["safetensors", "dummy"] = option(
        "safetensors", "Model", "dummy gives seeded random weights: for benchmarks, no weight is read"
    )
    dtype: Dtype = option(
        AUTO, "Model", "type of weights and computation (auto: the model's own; float32 for float16 on a CPU)"
    )
    quantization: Literal["auto", "none", "fp8"] = option(
        AUTO,
        "Model",
        "fp8 keeps the matrices of attention and MLP in e4m3, one scale for each output, and rounds activations "
        "likewise, one scale for each token (auto: as the checkpoint is)",
    )
    max_model_len: int | None = option(
        None, "Model", "longest prompt plus output, in tokens (default: what the model was made for)"
    )

    host: str = option("127.0.0.1", "Server", "address to listen on; 0.0.0.0 for all")
    port: int = option(API_PORT, "Server", "port to listen on; 0 takes a free one and logs it")
    tokenizer_backend: TokenizerBackend = option(
        "tokenizers",
        "Server",
        "who encodes prompts: fastokens is faster, and is used where it agrees with tokenizers on a probe",
    )
    tokenizer_worker_num: int = option(
        1, "Server", "tokenizer processes; 0: the detokenizer process also tokenizes"
    )
    max_request_bytes: int = option(8 << 20, "Server", "largest request body, in bytes")
    max_connections: int = option(8192, "Server", "most open connections; beyond, 503 to all but probes")
    request_timeout_seconds: float = option(
        0.0, "Server", "a request that takes longer ends with what it has; 0: no limit"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Server",
        "a key that requests must carry as 'Authorization: Bearer KEY'; may be repeated. Other users of the machine "
        "see a command line: prefer the variable (keys separated by commas) or --api-key-file",
        secret=True,
    )
    api_key_file: str | None = option(
        None, "Server", "a file of such keys, one a line; # begins a comment. Read once, at the start"
    )
    isolate_keys: bool = option(
        False,
        "Server",
        "requests share cached prefixes only with requests of the same key, so that the time of an answer reveals "
        "nothing of what others sent",
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "Server",
        "a key for what acts on the requests of others (POST /abort and /flush_cache), and for all else; may be "
        "repeated. Without one these are off, unless the server listens on loopback only",
        secret=True,
    )
    admin_api_key_file: str | None = option(
        None, "Server", "a file of such keys, one a line; # begins a comment. Read once, at the start"
    )
    allow_priority: bool = option(
        False, "Server", "let requests ask for a priority below 0, which runs before the requests of others"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Server",
        "a host name that requests may address besides localhost, where the server listens on loopback without keys: "
        "else a web page could reach it by a name of its own (DNS rebinding). * for all; may be repeated",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Server",
        "a web origin, such as https://chat.example.org, whose pages may call the API; * for all; may be repeated. "
        "Without keys, requests to generate or to act that pages of other origins make are refused",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "none"] = option(
        AUTO, "Server", "how the model writes tool calls (auto: as its chat template does)"
    )
    reasoning_parser: Literal["auto", "think", "none"] = option(
        AUTO,
        "Server",
        "how the model writes reasoning: think means between <think> and </think> (auto: as its chat template does)",
    )
    grammar_timeout_seconds: float = option(
        10.0, "Server", "how long the grammar of a structured answer may take to compile; beyond, 400"
    )
    drain_timeout_seconds: float = option(
        30.0, "Server", "after SIGTERM, how long running requests may take to finish"
    )
    startup_timeout_seconds: float = option(
        1800.0, "Server", "how long processes may take until the model is ready"
    )
    heartbeat_timeout_seconds: float = option(
        60.0, "Server", "a process that is silent for longer counts as dead"
    )
    watchdog_timeout: float = option(
        600.0, "Server", "a step of the engine that takes longer counts as hung, and ends the service"
    )
    otlp_traces_endpoint: str | None = option(
        None, "Server", "send a trace of each request to this OpenTelemetry collector: http(s)://host:4318"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Server", "least level that is logged"
    )

    device: Device = option(AUTO, "Engine", "where the model runs (auto: cuda if present)")
    tp_size: int = option(
        1,
        "Engine",
        "tensor-parallel ranks, one process (and one GPU) each",
        flags=("--tp", "--tensor-parallel-size"),
    )
    attention_backend: Attention = option(
        AUTO,
        "Engine",
        "attention backend, or one for prefill and one for decode (auto: torch on a CPU; on a GPU triton, but for "
        "prefill flashinfer where its kernels are built)",
    )
    disable_cuda_graph: bool = option(
        False, "Engine", "on a GPU, launch steps kernel by kernel (slower; the tokens are the same)"
    )
    disable_cascade_attn: bool = option(
        False, "Engine", "on a GPU, let each row of a decode step read the whole of its prefix"
    )
    kernel_cache_dir: str | None = option(
        None,
        "Engine",
        "where compiled GPU kernels are kept (default: kernels in the default of --download-dir)",
    )
    cpu_threads: int | None = option(
        None,
        "Engine",
        "most computing threads of each rank on a CPU (default: the cores it may use, over --tp)",
    )

    max_running_requests: int = option(64, "Scheduling", "most requests that are computed at a time")
    max_queued_requests: int = option(1024, "Scheduling", "most requests that wait; beyond, 429")
    max_queued_tokens: int = option(
        1 << 22, "Scheduling", "most prompt tokens of requests that wait, in all; beyond, 429"
    )
    schedule_policy: Literal["fcfs", "lpm"] = option(
        "fcfs",
        "Scheduling",
        "who runs next among equal priorities: fcfs, who came first; prefix, whose prompt has the longest cached prefix",
    )
    max_num_batched_tokens: int = option(
        2048, "Scheduling", "tokens computed in one step, so also the longest prefill chunk"
    )
    mixed_prefill_tokens: int | None = option(
        None,
        "Scheduling",
        "most prompt tokens in a step in which others decode (default: what --max-num-batched-tokens leaves); fewer keep a "
        "long prompt from holding up the next tokens of the others",
    )
    disable_overlap_schedule: bool = option(
        False,
        "Scheduling",
        "plan a step only after the one before it has ended (slower; the tokens are the same)",
    )

    page_size: int = option(16, "KV cache", "tokens in one page of the KV cache")
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = option(
        AUTO,
        "KV cache",
        "type of K and V in the cache; fp8_e4m3 holds twice the tokens (auto: that of --dtype)",
    )
    max_total_tokens: int | None = option(
        None, "KV cache", "size of the KV cache in tokens (default: by --mem-fraction-static)"
    )
    mem_fraction_static: float = option(
        0.85,
        "KV cache",
        "share of the free memory that the KV cache may take, where --max-total-tokens is not given",
    )
    disable_radix_cache: bool = option(
        False, "KV cache", "keep no prefix of an ended request for later ones (for measurements)"
    )

    @property
    def running_limit(self) -> int:
        """Most requests that run at a time: each of them computes one token a step."""
        return min(self.max_running_requests, self.max_num_batched_tokens)

    def shown(self) -> dict[str, Any]:
        """All fields but the secret ones, for people and programs to read."""
        return {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if not each.metadata["secret"]
        }

    def __post_init__(self) -> None:
        """Refuse values that no model could be served with."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{flag(name)} must be from {low} to {high}, not {value}")
        if not self.model:
            raise ConfigError(
                "--model must not be empty; give a directory, file:///path, hf://org/name or demo://"
            )
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"--max-total-tokens ({self.max_total_tokens}) must hold at least one page of "
                f"--page-size {self.page_size}"
            )
        check_api_keys(self.api_key, "--api-key")
        check_api_keys(self.admin_api_key, "--admin-api-key")
        if self.isolate_keys and not (self.api_key or self.api_key_file):
            raise ConfigError(
                "--isolate-keys needs keys that tell clients apart: add --api-key or --api-key-file"
            )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"--allowed-hosts must be * or a host name without a port, not {host!r}")
        if self.otlp_traces_endpoint is not None and not re.match(
            r"https?://[^/\s]+", self.otlp_traces_endpoint
        ):
            raise ConfigError(
                f"--otlp-traces-endpoint must be http(s)://host[:port], not {self.otlp_traces_endpoint!r}"
            )
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed-origins must be * or scheme://host[:port] without a path, not {origin!r}"
                )


_RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("port", 0, 65535),
    ("tokenizer_worker_num", 0, 64),
    ("max_request_bytes", 1024, 1 << 30),
    ("max_connections", 1, 1 << 20),
    ("request_timeout_seconds", 0, 86400),
    ("grammar_timeout_seconds", 0.1, 3600),
    ("drain_timeout_seconds", 0, 86400),
    ("startup_timeout_seconds", 1, 86400),
    ("heartbeat_timeout_seconds", 1, 3600),
    ("watchdog_timeout", 1, 86400),
    ("tp_size", 1, MAX_TENSOR_PARALLEL),
    ("cpu_threads", 1, 1024),
    ("max_model_len", 2, 1 << 24),
    ("max_running_requests", 1, 4096),
    ("max_queued_requests", 0, 1 << 20),
    ("max_queued_tokens", 1, 1 << 40),
    ("max_num_batched_tokens", 1, 1 << 20),
    ("mixed_prefill_tokens", 1, 1 << 20),
    ("page_size", 1, MAX_PAGE_SIZE),
    ("max_total_tokens", 2, 1 << 40),
    ("mem_fraction_static", 0.01, 0.99),
)


_HOST: Final = re.compile(r"\*|[A-Za-z0-9_]([A-Za-z0-9._-]{0,252})|\[?[0-9A-Fa-f:.]+\]?")
_ORIGIN: Final = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/,*]+")


def flags(name: str) -> tuple[str, ...]:
    """Return all spellings of a field on the command line, the usual one first."""
    return _FLAGS.get(name) or ("--" + name.replace("_", "-"),)


def flag(name: str) -> str:
    """Return the usual spelling of a field on the command line: ``max_model_len`` -> ``--max-model-len``."""
    return flags(name)[0]


def field_names() -> tuple[str, ...]:
    """Names of all fields, in the order of declaration."""
    return tuple(each.name for each in dataclasses.fields(Config))


_FLAGS: Final = {each.name: each.metadata["flags"] for each in dataclasses.fields(Config)}
