"""The runtime's contract with the world outside its pod.

Ports, paths, flags, environment variables, labels, exit codes, start phases and metric names. The operator,
the chart and the dashboards may depend on these and on nothing else of the runtime, so this module imports
nothing but typing.
"""

from typing import Final

API_GROUP: Final = "serving.skiff.dev"
API_VERSION: Final = "v1alpha1"

# --- Network -----------------------------------------------------------------

API_PORT: Final = 8000
API_PORT_NAME: Final = "http"
OPERATOR_METRICS_PORT: Final = 9090
OPERATOR_HEALTH_PORT: Final = 8081
PEER_PORT: Final = 8010
"""Port of a fetcher that sends its model to other nodes."""

PATH_HOME: Final = "/"
PATH_LIVEZ: Final = "/livez"
PATH_READYZ: Final = "/readyz"
PATH_STARTUPZ: Final = "/startupz"
PATH_HEALTH_GENERATE: Final = "/health_generate"
PATH_HEALTH: Final = "/health"
PATH_PING: Final = "/ping"
PATH_METRICS: Final = "/metrics"
PATH_EVENTS: Final = "/events"
PATH_SERVER_INFO: Final = "/server_info"
PATH_VERSION: Final = "/version"
PATH_TOKENIZER_INFO: Final = "/tokenizer_info"
PATH_MODELS: Final = "/v1/models"
PATH_CHAT_COMPLETIONS: Final = "/v1/chat/completions"
PATH_COMPLETIONS: Final = "/v1/completions"
PATH_MESSAGES: Final = "/v1/messages"
PATH_COUNT_TOKENS: Final = "/v1/messages/count_tokens"
PATH_RESPONSES: Final = "/v1/responses"
PATH_GENERATE: Final = "/generate"
PATH_EMBEDDINGS: Final = "/v1/embeddings"
PATH_RERANK: Final = "/v1/rerank"
PATH_RERANK_BARE: Final = "/rerank"
PATH_RERANK_V2: Final = "/v2/rerank"
PATH_SCORE: Final = "/v1/score"
PATH_SCORE_BARE: Final = "/score"
PATH_TOKENIZE: Final = "/tokenize"
PATH_DETOKENIZE: Final = "/detokenize"
PATH_ABORT: Final = "/abort"
PATH_FLUSH_CACHE: Final = "/flush_cache"
PATH_LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
PATH_UNLOAD_ADAPTER: Final = "/v1/unload_lora_adapter"
PATH_OPENAPI: Final = "/openapi.json"
PATH_DOCS: Final = "/docs"
PATH_PEER_STATUS: Final = "/status"
PATH_PEER_MANIFEST: Final = "/manifest"
PATH_PEER_FILES: Final = "/files"

# --- Command line --------------------------------------------------------------

ENV_PREFIX: Final = "SKIFF_"
"""`--max-model-len` is also read from `SKIFF_MAX_MODEL_LEN`; the flag wins."""

COMMAND_SERVE: Final = "serve"
COMMAND_FETCH: Final = "fetch"

FLAG_MODEL: Final = "--model"
FLAG_REVISION: Final = "--revision"
FLAG_SERVED_MODEL_NAME: Final = "--served-model-name"
FLAG_DOWNLOAD_DIR: Final = "--download-dir"
FLAG_PEER: Final = "--peer"
FLAG_SERVE_PEERS: Final = "--serve-peers"
FLAG_WAIT: Final = "--wait"
FLAG_ADAPTER_ONLY: Final = "--adapter-only"
FLAG_HOST: Final = "--host"
FLAG_PORT: Final = "--port"
FLAG_DEVICE: Final = "--device"
FLAG_DTYPE: Final = "--dtype"
FLAG_TENSOR_PARALLEL: Final = "--tp"
FLAG_TENSOR_PARALLEL_SIZE: Final = "--tensor-parallel-size"
"""The same in full, as vLLM and SGLang spell it."""
FLAG_MAX_MODEL_LEN: Final = "--max-model-len"
FLAG_KERNEL_CACHE_DIR: Final = "--kernel-cache-dir"
FLAG_DRAIN_TIMEOUT: Final = "--drain-timeout-seconds"
FLAG_STARTUP_TIMEOUT: Final = "--startup-timeout-seconds"
FLAG_API_KEY_FILE: Final = "--api-key-file"
FLAG_ENABLE_LORA: Final = "--enable-lora"
FLAG_LORA: Final = "--lora"
"""`NAME=URI`, repeatable: an adapter to load at the start."""
FLAG_MAX_LORAS: Final = "--max-loras"
FLAG_MAX_LORA_RANK: Final = "--max-lora-rank"
FLAG_MAX_CPU_LORAS: Final = "--max-cpu-loras"
FLAG_LORA_DOWNLOAD_DIR: Final = "--lora-download-dir"
MAX_LORAS: Final = 512
MAX_LORA_RANK: Final = 128
"""Upper bounds of the two flags; the kernels support no higher rank."""

ENV_LORA: Final = "SKIFF_LORA"
"""The values of `--lora`, separated by commas."""
ENV_ADMIN_KEY_DIGEST: Final = "SKIFF_ADMIN_API_KEY_SHA256"
ENV_KERNEL_CACHE_DIR: Final = "SKIFF_KERNEL_CACHE_DIR"
ENV_HUB_TOKEN: Final = "HF_TOKEN"
ENV_HUB_ENDPOINT: Final = "HF_ENDPOINT"
ENV_S3_ENDPOINT: Final = "AWS_ENDPOINT_URL"
ENV_S3_KEY_ID: Final = "AWS_ACCESS_KEY_ID"
ENV_S3_SECRET_KEY: Final = "AWS_SECRET_ACCESS_KEY"
ENV_S3_SESSION_TOKEN: Final = "AWS_SESSION_TOKEN"
ENV_GS_ENDPOINT: Final = "GOOGLE_BASE_URL"
ENV_GS_CREDENTIALS: Final = "GOOGLE_SERVICE_ACCOUNT_KEY"
"""A service account's key, as the JSON text itself."""
ENV_OCI_ENDPOINT: Final = "OCI_ENDPOINT"
"""Address of a registry that is not reached by https:// and its name, such as a mirror."""
ENV_OCI_CREDENTIALS: Final = "DOCKER_AUTH_CONFIG"
"""The text of a Docker configuration (config.json), as for Docker's own command line."""
ENV_PEER_TOKEN: Final = "SKIFF_PEER_TOKEN"
"""Shared secret of the fetchers of one model."""

FETCHED_SCHEMES: Final = ("gs", "hf", "oci", "s3")
"""Models that are downloaded into a cache."""
MODEL_SCHEMES: Final = ("demo", "file", "gs", "hf", "oci", "pvc", "s3")
"""The operator alone understands `pvc://`: it turns it into a local path."""

# --- Exit codes ------------------------------------------------------------------

EXIT_OK: Final = 0
EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_CHILD_DIED: Final = 3
EXIT_STARTUP_FAILED: Final = 4
EXIT_FETCH_FAILED: Final = 5

# --- Start phases, in the order in which a rank passes them ------------------------

PHASES: Final = ("spawn", "config", "weights", "kv_cache", "warmup", "ready")

# --- Labels and annotations on Kubernetes objects -----------------------------------

LABEL_NAME: Final = "app.kubernetes.io/name"
LABEL_INSTANCE: Final = "app.kubernetes.io/instance"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
LABEL_SERVICE: Final = f"{API_GROUP}/inferenceservice"
LABEL_MODEL_CACHE: Final = f"{API_GROUP}/modelcache"
LABEL_ENGINE_TYPE: Final = "llm-d.ai/engine-type"
ENGINE_TYPE: Final = "sglang"
"""Skiff exports the routing gauges under SGLang's names; this label makes routers read them."""

# --- Metric names ----------------------------------------------------------------------

METRIC_REQUESTS: Final = "skiff_requests_total"
METRIC_REJECTED: Final = "skiff_rejected_requests_total"
METRIC_TTFT: Final = "skiff_time_to_first_token_seconds"
METRIC_ITL: Final = "skiff_inter_token_latency_seconds"
METRIC_E2E_LATENCY: Final = "skiff_e2e_request_latency_seconds"
METRIC_QUEUED: Final = "skiff_requests_queued"
METRIC_RUNNING: Final = "skiff_requests_running"
METRIC_IN_FLIGHT: Final = "skiff_requests_in_flight"
METRIC_PROMPT_TOKENS: Final = "skiff_prompt_tokens_total"
METRIC_CACHED_TOKENS: Final = "skiff_cached_tokens_total"
METRIC_GENERATION_TOKENS: Final = "skiff_generation_tokens_total"
METRIC_KV_CACHE_PAGES: Final = "skiff_kv_cache_pages"
METRIC_KV_CACHE_USAGE: Final = "skiff_kv_cache_usage_ratio"
METRIC_STEP_DURATION: Final = "skiff_step_duration_seconds"
METRIC_STEP_TOKENS: Final = "skiff_step_tokens"
METRIC_PREEMPTIONS: Final = "skiff_preemptions_total"
METRIC_EVICTED_PAGES: Final = "skiff_evicted_pages_total"
METRIC_CORRUPTED: Final = "skiff_corrupted_requests_total"
METRIC_GRAPHS_PENDING: Final = "skiff_cuda_graphs_pending"
METRIC_START_PHASE: Final = "skiff_start_phase_seconds"
METRIC_QUEUED_TOKENS: Final = "skiff_queued_prompt_tokens"
METRIC_QUEUE_TIME: Final = "skiff_request_queue_time_seconds"
METRIC_PREFILL_TIME: Final = "skiff_request_prefill_time_seconds"
METRIC_DECODE_TIME: Final = "skiff_request_decode_time_seconds"
METRIC_INFERENCE_TIME: Final = "skiff_request_inference_time_seconds"
METRIC_TPOT: Final = "skiff_request_time_per_output_token_seconds"
METRIC_REQUEST_PROMPT_TOKENS: Final = "skiff_request_prompt_tokens"
METRIC_REQUEST_GENERATION_TOKENS: Final = "skiff_request_generation_tokens"
METRIC_REQUEST_LONGEST_CHOICE: Final = "skiff_request_longest_choice_tokens"
METRIC_REQUEST_CHOICES: Final = "skiff_request_choices"
METRIC_REQUEST_MAX_TOKENS: Final = "skiff_request_max_tokens"
METRIC_PREFILL_BATCH: Final = "skiff_prefill_batch_requests"
METRIC_DECODE_BATCH: Final = "skiff_decode_batch_requests"
METRIC_PREFIX_CACHE_QUERIES: Final = "skiff_prefix_cache_queries_total"
METRIC_PREFIX_CACHE_HITS: Final = "skiff_prefix_cache_hits_total"
METRIC_FINISHED: Final = "skiff_finished_requests_total"
METRIC_ABORTS: Final = "skiff_aborted_requests_total"
METRIC_PROCESS_UP: Final = "skiff_process_up"
METRIC_HEARTBEAT_AGE: Final = "skiff_process_heartbeat_age_seconds"
METRIC_CONNECTIONS: Final = "skiff_http_connections"
METRIC_READY: Final = "skiff_ready"
METRIC_KEY_RELOADS: Final = "skiff_api_key_reloads_total"
METRIC_KEYS_CURRENT: Final = "skiff_api_keys_last_reload_successful"
METRIC_ADAPTERS: Final = "skiff_lora_adapters"
METRIC_LORA_SLOTS: Final = "skiff_lora_slots"
METRIC_ADAPTER_READS: Final = "skiff_lora_reads_total"
METRIC_ADAPTER_LOADS: Final = "skiff_lora_slot_loads_total"
METRIC_ADAPTER_EVICTIONS: Final = "skiff_lora_slot_evictions_total"
ROUTER_METRIC_WAITING: Final = "skiff_router_waiting_requests"
"""A gauge of the router; the rest of its metrics are defined with it."""

ROUTING_QUEUED: Final = "sglang:num_queue_reqs"
ROUTING_RUNNING: Final = "sglang:num_running_reqs"
ROUTING_USAGE: Final = "sglang:token_usage"
ROUTING_CACHE_INFO: Final = "sglang:cache_config_info"

OPERATOR_RECONCILES: Final = "skiff_operator_reconciles_total"
OPERATOR_RECONCILE_DURATION: Final = "skiff_operator_reconcile_duration_seconds"
OPERATOR_QUEUE_DEPTH: Final = "skiff_operator_queue_depth"
OPERATOR_OBJECTS: Final = "skiff_operator_objects"
OPERATOR_LEADER: Final = "skiff_operator_leader"
OPERATOR_LAST_RESYNC: Final = "skiff_operator_last_resync_timestamp_seconds"
OPERATOR_API_REQUESTS: Final = "skiff_operator_api_requests_total"
OPERATOR_POD_STARTUP: Final = "skiff_operator_pod_startup_seconds"
OPERATOR_WATCH_SILENCE: Final = "skiff_operator_watch_silence_seconds"
OPERATOR_WATCH_LISTS: Final = "skiff_operator_watch_lists_total"
OPERATOR_SERVICE_READY: Final = "skiff_operator_inferenceservice_ready"
OPERATOR_SERVICE_DEGRADED: Final = "skiff_operator_inferenceservice_degraded"
OPERATOR_SERVICE_ROLLING_OUT: Final = "skiff_operator_inferenceservice_rolling_out"
OPERATOR_SERVICE_ADAPTERS: Final = "skiff_operator_inferenceservice_adapters"
OPERATOR_ADAPTER_REQUESTS: Final = "skiff_operator_adapter_requests_total"
OPERATOR_SCALINGS: Final = "skiff_operator_scalings_total"
OPERATOR_LOAD_READINGS: Final = "skiff_operator_load_readings_total"
OPERATOR_RESTARTS: Final = "skiff_operator_container_restarts_total"
