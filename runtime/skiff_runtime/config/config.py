"""The configuration of a served model, validated once at the edge.

Every field of ``Config`` is a command-line flag (``--max-model-len``) and an environment variable
(``SKIFF_MAX_MODEL_LEN``); ``arguments.py`` derives both from the metadata here. Where vLLM or SGLang have the
option, it has their name. Child processes receive the resolved configuration and trust it.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from skiff_runtime.config.adapters import MAX_ADAPTERS, parse_adapters
from skiff_runtime.config.api_keys import check_api_keys, check_key_digests
from skiff_runtime.config.kv_events import KVEventsConfig
from skiff_runtime.contract import API_PORT, MAX_LORA_RANK, MAX_LORAS
from skiff_runtime.errors import ConfigError

MAX_TENSOR_PARALLEL: Final = 64
MAX_PAGE_SIZE: Final = 1024
AUTO: Final = "auto"

Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["auto", "torch", "triton", "flashinfer", "flashinfer,triton", "triton,flashinfer"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
TokenizerBackend = Literal["auto", "tokenizers", "fastokens"]
Quantization = Literal["none", "fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq"]
"""How weights are quantized: not at all, or the method that a checkpoint's ``quant_method`` names."""
QuantizationOption = Literal["auto", "none", "fp8", "fbgemm_fp8", "compressed-tensors", "awq", "gptq"]
"""The same, or ``auto``, which is as the checkpoint is."""
PoolingType = Literal["auto", "last", "mean"]
RerankTemplate = Literal["auto", "qwen3", "none"]
AllReduceBackend = Literal["auto", "nccl", "p2p"]


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
    """The options of ``skiff serve``. ``resolve.py`` derives the fields that are ``None``."""

    model: str = option(
        "demo://",
        "Model",
        "the model: a directory or GGUF file, file:///path, hf://org/name (hf://org/name:Q4_K_M chooses a GGUF file), "
        "s3://bucket/prefix, gs://bucket/prefix, oci://registry/repository:tag, "
        "demo://, or shape://name for a benchmark",
    )
    revision: str | None = option(None, "Model", "revision of an hf:// model (default: main)")
    download_dir: str | None = option(
        None, "Model", "directory for downloaded models (default: $HF_HUB_CACHE, or ~/.cache/huggingface/hub)"
    )
    served_model_name: str | None = option(
        None, "Model", "the model's name in the API (default: the last part of --model)"
    )
    load_format: Literal["auto", "safetensors", "dummy"] = option(
        AUTO,
        "Model",
        "dummy: seeded random weights instead of the model's files, for benchmarks (auto: the model's files, safetensors "
        "or GGUF)",
    )
    dtype: Dtype = option(
        AUTO,
        "Model",
        "data type of weights and activations (auto: the model's own; float32 for float16 on a CPU)",
    )
    quantization: QuantizationOption = option(
        AUTO,
        "Model",
        "fp8: weights of attention, MLP and experts in FP8 (e4m3), with one scale per output channel, and activations "
        "with one scale per token. All other methods are those of checkpoints (auto: as the checkpoint is)",
    )
    max_model_len: int | None = option(
        None, "Model", "maximum length of prompt plus output, in tokens (default: the model's own)"
    )
    rope_scaling: str | None = option(
        None,
        "Model",
        "YaRN settings that extend the context, as JSON, instead of the model's own RoPE scaling: "
        '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768} serves factor times as many '
        "tokens (default: the model's own)",
    )
    chat_template: str | None = option(
        None,
        "Model",
        "file with a chat template in Jinja, used instead of the model's own, such as one that shows tools "
        "(default: the model's own)",
    )

    host: str = option("127.0.0.1", "Server", "address to listen on; 0.0.0.0 for all interfaces")
    port: int = option(API_PORT, "Server", "port to listen on; 0: any free port, which is logged")
    tokenizer_backend: TokenizerBackend = option(
        AUTO,
        "Server",
        "library that encodes prompts; fastokens is faster, and is used only if it agrees with tokenizers on probe texts "
        "(auto: fastokens if it is installed and agrees)",
    )
    tokenizer_worker_num: int = option(
        1, "Server", "number of tokenizer processes; 0: the detokenizer process also tokenizes"
    )
    max_request_bytes: int = option(8 << 20, "Server", "maximum size of a request body, in bytes")
    max_connections: int = option(
        8192, "Server", "maximum number of open connections; further ones get 503, probes excepted"
    )
    request_timeout_seconds: float = option(
        0.0, "Server", "time after which a request ends with the tokens that it has so far; 0: no limit"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Server",
        "key that requests must send as 'Authorization: Bearer KEY'; may be repeated. Other users of the machine can "
        "see a command line: prefer the variable (keys separated by commas) or --api-key-file",
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "Server",
        "file of such keys, one per line as KEY or NAME: KEY; # begins a comment. Read again when it changes",
    )
    isolate_keys: bool = option(
        False,
        "Server",
        "share cached prefixes only among requests with the same key, so that response times reveal nothing about "
        "the prompts of other clients",
    )
    admin_api_key: tuple[str, ...] = option(
        (),
        "Server",
        "key for POST /abort and /flush_cache, which affect the requests of others, and for all other endpoints; may "
        "be repeated. Without such a key these two are off, unless the server listens on loopback only",
        secret=True,
    )
    admin_api_key_file: str | None = option(
        None,
        "Server",
        "file of such keys, one per line as KEY or NAME: KEY; # begins a comment. Read again when it changes",
    )
    admin_api_key_sha256: tuple[str, ...] = option(
        (),
        "Server",
        "SHA-256 digest of such a key, as 64 hexadecimal digits: the server knows a key only while it is sent; may be repeated",
    )
    allow_priority: bool = option(
        False, "Server", "allow requests a priority below 0, which runs them before the requests of others"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Server",
        "host name, besides localhost, that a request's Host header may contain if the server listens on loopback "
        "without keys (protects against DNS rebinding). *: any; may be repeated",
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Server",
        "web origin, such as https://chat.example.org, whose pages may call the API (CORS). *: any; may be repeated. "
        "Without keys, requests from pages of other origins to generate or to change state are refused",
    )
    strict: bool = option(
        False,
        "Server",
        "refuse request fields that cannot change the answer (hints, such as metadata), instead of accepting them",
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "pythonic", "qwen3_coder", "none"] = (
        option(
            AUTO, "Server", "format in which the model writes tool calls (auto: that of its chat template)"
        )
    )
    reasoning_parser: Literal["auto", "think", "deepseek_r1", "mistral", "none"] = option(
        AUTO,
        "Server",
        "format in which the model writes its reasoning; think: between <think> and </think>; deepseek_r1: the same, "
        "without the first; mistral: between [THINK] and [/THINK] (auto: that of its chat template)",
    )
    pooling_type: PoolingType = option(
        AUTO,
        "Server",
        "hidden states from which an embedding is computed: that of the last token, or the mean of all (auto: as the "
        "model's sentence-transformers files say; last without these)",
    )
    rerank_template: RerankTemplate = option(
        AUTO,
        "Server",
        'prompt by which a model judges a pair of texts; qwen3: that of Qwen3-Reranker, which answers "yes" or "no"; none: '
        'scores are similarities of embeddings (auto: qwen3 for a Qwen3 model with "reranker" in its name)',
    )
    grammar_timeout_seconds: float = option(
        10.0, "Server", "time limit for compiling the grammar of a structured output; beyond it, 400"
    )
    drain_timeout_seconds: float = option(
        30.0, "Server", "time that running requests have to finish after SIGTERM"
    )
    startup_timeout_seconds: float = option(
        1800.0, "Server", "time that the processes have until the model is ready"
    )
    heartbeat_timeout_seconds: float = option(
        60.0, "Server", "time without a heartbeat after which a process other than a rank counts as dead"
    )
    rank_heartbeat_timeout_seconds: float | None = option(
        None,
        "Server",
        "the same for a rank, whose main loop only plans steps and waits for them: the others wait for it in a collective "
        "(default: 60 on a CPU, 10 on a GPU)",
    )
    watchdog_timeout: float | None = option(
        None,
        "Server",
        "seconds after which a step of the engine counts as hung, which ends the service (default: 600 on a CPU, 120 on "
        "a GPU)",
    )
    otlp_traces_endpoint: str | None = option(
        None, "Server", "OpenTelemetry collector that receives a trace of each request: http(s)://host:4318"
    )
    metrics_names: str = option(
        "skiff",
        "Server",
        "names of the metrics on /metrics, separated by commas; skiff,vllm: the important ones also under vLLM's names",
    )
    kv_events_config: str | None = option(
        None,
        "Server",
        "vLLM's stream of KV cache events over ZeroMQ, as JSON: "
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": '
        '"tcp://*:5558", "buffer_steps": 10000, "hwm": 100000, "max_queue_size": 100000, "topic": ""} (default: none)',
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Server", "minimum level of logged events"
    )

    device: Device = option(AUTO, "Engine", "device that runs the model (auto: cuda if present)")
    tp_size: int = option(
        1,
        "Engine",
        "tensor-parallel size: number of ranks, each a process (with one GPU)",
        flags=("--tp", "--tensor-parallel-size"),
    )
    expert_parallel: bool = option(
        False,
        "Engine",
        "divide the experts of a mixture of experts over the ranks, instead of each expert's columns",
        flags=("--expert-parallel", "--enable-expert-parallel"),
    )
    all_reduce: AllReduceBackend = option(
        AUTO,
        "Engine",
        "how GPUs of several ranks sum activations; p2p: kernels and copies that write into the memory of the other GPUs, "
        "NCCL for messages too large for them; nccl: NCCL alone (auto: p2p where the GPUs have peer access)",
    )
    attention_backend: Attention = option(
        AUTO,
        "Engine",
        "attention backend, or PREFILL,DECODE (auto: torch on a CPU; on a GPU triton, with flashinfer for prefill if "
        "its kernels are built)",
    )
    disable_cuda_graph: bool = option(
        False,
        "Engine",
        "launch kernels one by one instead of replaying CUDA graphs (slower; the tokens are the same)",
    )
    disable_cascade_attn: bool = option(
        False,
        "Engine",
        "do not group decode rows that share a prefix; each row reads the whole of its own context",
    )
    disable_deferred_graph_capture: bool = option(
        False,
        "Engine",
        "capture all CUDA graphs before the service is ready; by default those of more than 8 rows, and those of prompts, "
        "are captured once it is, while it is idle or between steps",
    )
    disable_memory_profile_cache: bool = option(
        False,
        "Engine",
        "measure the memory of CUDA graphs at every start, instead of keeping it in --kernel-cache-dir; the memory of "
        "the largest step is measured in any case",
    )
    kernel_cache_dir: str | None = option(
        None,
        "Engine",
        "directory for compiled GPU kernels (default: ~/.cache/skiff/kernels)",
    )
    cpu_threads: int | None = option(
        None,
        "Engine",
        "maximum number of compute threads of each rank on a CPU (default: the available cores divided by --tp)",
    )

    max_running_requests: int = option(
        64, "Scheduling", "maximum number of requests that run at a time (the batch size)"
    )
    max_queued_requests: int = option(
        1024, "Scheduling", "maximum number of waiting requests; beyond it, 429"
    )
    max_queued_tokens: int = option(
        1 << 22, "Scheduling", "maximum number of prompt tokens of all waiting requests; beyond it, 429"
    )
    schedule_policy: Literal["fcfs", "lpm"] = option(
        "fcfs",
        "Scheduling",
        "order of waiting requests of equal priority: fcfs, first come, first served; lpm, longest cached prefix first",
    )
    max_num_batched_tokens: int = option(
        2048, "Scheduling", "maximum number of tokens in one step, and so the size of a prefill chunk"
    )
    mixed_prefill_tokens: int | None = option(
        None,
        "Scheduling",
        "maximum number of prompt tokens in a step that also decodes (default: what --max-num-batched-tokens leaves); "
        "a smaller one lowers the inter-token latency of running requests while a long prompt is computed",
    )
    disable_overlap_schedule: bool = option(
        False,
        "Scheduling",
        "plan each step only after the one before it has ended (slower; the tokens are the same)",
    )

    page_size: int = option(16, "KV cache", "number of tokens in a page of the KV cache")
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = option(
        AUTO,
        "KV cache",
        "data type of the KV cache; fp8_e4m3 holds twice as many tokens (auto: that of --dtype)",
    )
    max_total_tokens: int | None = option(
        None, "KV cache", "size of the KV cache in tokens (default: by --mem-fraction-static)"
    )
    mem_fraction_static: float = option(
        0.85,
        "KV cache",
        "fraction of the memory free after loading the weights that activations and KV cache may use, unless "
        "--max-total-tokens is given",
    )
    disable_radix_cache: bool = option(
        False,
        "KV cache",
        "disable the prefix cache: every request computes its whole prompt (for measurements)",
    )

    enable_lora: bool = option(
        False,
        "LoRA",
        "serve LoRA adapters, which requests choose by their name as the model; they are loaded by --lora and by POST "
        "/v1/load_lora_adapter",
    )
    lora: tuple[str, ...] = option(
        (),
        "LoRA",
        "adapter to load at the start, as NAME=URI, with the URIs of --model; may be repeated; implies --enable-lora",
    )
    max_loras: int = option(
        8, "LoRA", "maximum number of adapters in GPU memory, and so in one batch; others wait for a slot"
    )
    max_lora_rank: int = option(
        16, "LoRA", "maximum rank of an adapter; memory and time of every slot grow with it"
    )
    max_cpu_loras: int | None = option(
        None,
        "LoRA",
        "maximum number of adapters in host memory; others are read again from their files when a request needs them "
        "(default: four times --max-loras)",
    )
    lora_download_dir: str | None = option(
        None, "LoRA", "directory of downloaded adapters (default: --download-dir, beside models)"
    )

    @property
    def adapters_dir(self) -> str | None:
        """Directory of downloaded adapters; None for the hub's cache."""
        return self.lora_download_dir or self.download_dir

    @property
    def running_limit(self) -> int:
        """Maximum batch size: every running request needs at least one token of each step's budget."""
        return min(self.max_running_requests, self.max_num_batched_tokens)

    def public_fields(self) -> dict[str, Any]:
        """Return all fields but the secret ones, by name."""
        return {
            each.name: getattr(self, each.name)
            for each in dataclasses.fields(self)
            if not each.metadata["secret"]
        }

    @property
    def requires_key(self) -> bool:
        """Return whether requests must send an API key."""
        return bool(self.api_key or self.api_key_file)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value that no model could be served with."""
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
        parse_adapters(self.lora)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(
                f"--max-cpu-loras ({self.max_cpu_loras}) must be at least --max-loras ({self.max_loras}): an adapter in GPU "
                "memory is copied from host memory"
            )
        check_api_keys(self.api_key, "--api-key")
        check_api_keys(self.admin_api_key, "--admin-api-key")
        check_key_digests(self.admin_api_key_sha256, "--admin-api-key-sha256")
        if self.isolate_keys and not self.requires_key:
            raise ConfigError(
                "--isolate-keys needs API keys to distinguish clients: add --api-key or --api-key-file"
            )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"--allowed-hosts must be * or a host name without a port, not {host!r}")
        if not {"skiff"} <= set(self.metrics_names.split(",")) <= {"skiff", "vllm"}:
            raise ConfigError(f"--metrics-names must be skiff or skiff,vllm, not {self.metrics_names!r}")
        if self.kv_events_config is not None:
            events = KVEventsConfig.parse(self.kv_events_config)
            if events.is_enabled and self.disable_radix_cache:
                raise ConfigError(
                    "--kv-events-config: enable_kv_cache_events needs the prefix cache; remove --disable-radix-cache"
                )
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
    ("rank_heartbeat_timeout_seconds", 2, 3600),
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
    ("max_loras", 1, MAX_LORAS),
    ("max_lora_rank", 1, MAX_LORA_RANK),
    ("max_cpu_loras", 1, MAX_ADAPTERS),
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
    """Return the names of all fields, in the order of declaration."""
    return tuple(each.name for each in dataclasses.fields(Config))


_FLAGS: Final = {each.name: each.metadata["flags"] for each in dataclasses.fields(Config)}
