"""The router's frozen configuration and its flags."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from skiff_router import policies
from skiff_router.upstream import Address
from skiff_router.usage_log import STDOUT
from skiff_runtime.config.api_keys import read_api_keys
from skiff_runtime.contract import FLAG_API_KEY_FILE, FLAG_HOST, FLAG_PORT
from skiff_runtime.errors import ConfigError

DEFAULT_PORT: Final = 8080
MAX_BACKENDS: Final = 1024
MAX_NAMESPACES: Final = 64
"""Each costs the API server two watches."""
FLAG_BACKEND_API_KEY_FILE: Final = "--backend-api-key-file"
FLAG_LIMITS_FILE: Final = "--limits-file"
FLAG_USAGE_LOG: Final = "--usage-log"
FLAG_PEERS: Final = "--peers"
MAX_PEER_HOSTS: Final = 16
_ADDRESS: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")
_BACKEND: Final = re.compile(rf"(?P<model>[^=\s]+)=http://{_ADDRESS.pattern}/?")
_NAMESPACE: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

DESCRIPTION: Final = "Serve all models under one URL: route each request by its model to the pod that is expected to answer it soonest."
EPILOG: Final = """\
A request that fails before the first byte of its response is tried on another pod, at
most three times in all; a stream that breaks off later ends with an error event. Pods
that hang, drain or refuse connections get no requests until a probe of /readyz succeeds.
Requests for an InferenceService without a ready pod wait for one, and ask for one if it has
autoscaling; streams get comments with the progress of the start.

  GET /v1/models   the models, with the number of their pods by state
  GET /livez, /readyz, /metrics
  POST /v1/...     to a pod of the body's 'model', which is the name of a model or, with
                   --kubernetes, NAMESPACE/NAME of an InferenceService; so do /rerank,
                   /score, /tokenize and /detokenize, and /generate by X-Skiff-Model

examples:
  skiff router --backend llama=http://10.0.0.7:8000 --backend llama=http://10.0.0.8:8000
  skiff router --backend qwen=http://127.0.0.1:8000 --policy round-robin --port 9000
  skiff router --kubernetes --namespace models --host 0.0.0.0      # in a pod
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The options of one router.

    ``backends``: addresses of pods by the name of their model; empty with ``kubernetes``, where InferenceServices name
    them, those of ``namespaces`` or of all namespaces if it is empty. ``peers``: names or addresses of this router's replicas.
    """

    host: str
    port: int
    backends: dict[str, tuple[Address, ...]]
    kubernetes: bool
    namespaces: tuple[str, ...]
    policy: str
    api_key_file: str | None
    limits_file: str | None
    peers: tuple[Address, ...]
    usage_log: str | None
    backend_api_key_file: str | None
    first_byte_timeout_seconds: float
    drain_timeout_seconds: float
    max_waiting_requests: int
    max_waiting_bytes: int
    waiting_timeout_seconds: float
    max_request_bytes: int
    max_connections: int
    log_level: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff router``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(FLAG_HOST, default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument(
        FLAG_PORT, type=int, default=DEFAULT_PORT, help="port to listen on; 0: any (default: %(default)s)"
    )
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="MODEL=URL",
        help="a server of a model, http://HOST:PORT; may be repeated, also for the same model",
    )
    parser.add_argument(
        "--kubernetes",
        action="store_true",
        help="serve the InferenceServices of the cluster in which this pod runs",
    )
    parser.add_argument(
        "--namespace",
        action="append",
        default=[],
        metavar="NAME",
        help="only those of this namespace; may be repeated (default: all)",
    )
    parser.add_argument(
        "--policy",
        choices=policies.NAMES,
        default=policies.PREFIX,
        help="how a pod is chosen (default: %(default)s)",
    )
    parser.add_argument(
        FLAG_API_KEY_FILE,
        default=None,
        metavar="FILE",
        help="file of the API keys that clients need, a KEY or NAME: KEY on each line; read again when it changes. "
        "Without it, clients' keys are passed on, and pods check them",
    )
    parser.add_argument(
        FLAG_LIMITS_FILE,
        default=None,
        metavar="FILE",
        help="JSON file of limits for each key, {default: LIMITS, keys: {NAME: LIMITS}}, where LIMITS are "
        "requestsPerMinute, tokensPerMinute and concurrency; read again when it changes. "
        f"Only with {FLAG_API_KEY_FILE}",
    )
    parser.add_argument(
        FLAG_PEERS,
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="the replicas of this router, which share the limits: a name that resolves to all of their addresses, as that of "
        "a headless Service does, or one of them; may be repeated. This router may be among them. Without it, each "
        f"replica allows the whole limits. Only with {FLAG_LIMITS_FILE}",
    )
    parser.add_argument(
        FLAG_USAGE_LOG,
        default=None,
        metavar="FILE",
        help=f"file to which a line of JSON is added for each request, with its tokens and the name of its key; "
        f"{STDOUT}: the standard output",
    )
    parser.add_argument(
        FLAG_BACKEND_API_KEY_FILE,
        default=None,
        metavar="FILE",
        help=f"file with the one API key that pods require of the router; only with {FLAG_API_KEY_FILE}",
    )
    parser.add_argument(
        "--first-byte-timeout-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="limit on the time until the first byte of a response, queueing included (default: %(default)g)",
    )
    parser.add_argument(
        "--drain-timeout-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="limit on the time for running requests after SIGTERM (default: %(default)g)",
    )
    parser.add_argument(
        "--max-waiting-requests",
        type=int,
        default=4096,
        metavar="NUMBER",
        help="requests of all models that wait for a pod of an InferenceService to be ready; beyond it, or with 0, "
        "others get a 429 or a 503 (default: %(default)d)",
    )
    parser.add_argument(
        "--max-waiting-bytes",
        type=int,
        default=128 << 20,
        metavar="BYTES",
        help="bodies of the requests that wait, in all; beyond it, a 429 (default: %(default)d)",
    )
    parser.add_argument(
        "--waiting-timeout-seconds",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="limit on the time for which a request waits for a pod (default: %(default)g)",
    )
    parser.add_argument(
        "--max-request-bytes",
        type=int,
        default=32 << 20,
        metavar="BYTES",
        help="largest body of a request (default: %(default)d)",
    )
    parser.add_argument(
        "--max-connections",
        type=int,
        default=8192,
        metavar="NUMBER",
        help="connections of clients beyond which others get a 503 (default: %(default)d)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="(default: %(default)s)",
    )


def from_arguments(arguments: argparse.Namespace) -> RouterConfig:
    """Return the configuration of a command line.

    Raises:
        ConfigError: an option is malformed or out of range; the message names it.
    """
    for name, least in (
        ("first_byte_timeout_seconds", 0.1),
        ("drain_timeout_seconds", 0.0),
        ("max_waiting_requests", 0),
        ("max_waiting_bytes", 0),
        ("waiting_timeout_seconds", 0.0),
        ("max_request_bytes", 1024),
        ("max_connections", 1),
    ):
        if not getattr(arguments, name) >= least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least:g}")
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"{FLAG_PORT} {arguments.port} is not a port; use 0 to 65535")
    if arguments.limits_file is not None and arguments.api_key_file is None:
        raise ConfigError(
            f"{FLAG_LIMITS_FILE} without {FLAG_API_KEY_FILE} has no meaning; add {FLAG_API_KEY_FILE}"
        )
    if arguments.peers and arguments.limits_file is None:
        raise ConfigError(f"{FLAG_PEERS} without {FLAG_LIMITS_FILE} has no meaning; add {FLAG_LIMITS_FILE}")
    if arguments.backend_api_key_file is not None:
        if arguments.api_key_file is None:
            raise ConfigError(
                f"{FLAG_BACKEND_API_KEY_FILE} without {FLAG_API_KEY_FILE} would give everyone the router's own rights; "
                f"add {FLAG_API_KEY_FILE}"
            )
        read_single_key(arguments.backend_api_key_file, FLAG_BACKEND_API_KEY_FILE)
    if arguments.kubernetes == bool(arguments.backend):
        raise ConfigError("give either --kubernetes, or at least one --backend MODEL=http://HOST:PORT")
    if arguments.namespace and not arguments.kubernetes:
        raise ConfigError("--namespace without --kubernetes has no meaning; add --kubernetes")
    if len(arguments.namespace) > MAX_NAMESPACES:
        raise ConfigError(
            f"--namespace is given {len(arguments.namespace)} times; the limit is {MAX_NAMESPACES}; without it, "
            "all namespaces are served"
        )
    for name in arguments.namespace:
        if not _NAMESPACE.fullmatch(name):
            raise ConfigError(f"--namespace {name!r} is not the name of a namespace")
    return RouterConfig(
        host=arguments.host,
        port=arguments.port,
        backends=_parse_backends(arguments.backend),
        kubernetes=arguments.kubernetes,
        namespaces=tuple(dict.fromkeys(arguments.namespace)),
        policy=arguments.policy,
        api_key_file=arguments.api_key_file,
        limits_file=arguments.limits_file,
        peers=_parse_peers(arguments.peers),
        usage_log=arguments.usage_log,
        backend_api_key_file=arguments.backend_api_key_file,
        first_byte_timeout_seconds=arguments.first_byte_timeout_seconds,
        drain_timeout_seconds=arguments.drain_timeout_seconds,
        max_waiting_requests=arguments.max_waiting_requests,
        max_waiting_bytes=arguments.max_waiting_bytes,
        waiting_timeout_seconds=arguments.waiting_timeout_seconds,
        max_request_bytes=arguments.max_request_bytes,
        max_connections=arguments.max_connections,
        log_level=arguments.log_level,
    )


def read_single_key(path: str, flag: str) -> str:
    """Return the one API key in a file. Raises ConfigError if it cannot be read, or holds another number of keys."""
    keys = list(read_api_keys(str(Path(path)), flag))
    if len(keys) != 1:
        raise ConfigError(f"{flag} {path} holds {len(keys)} keys; it must hold one")
    return keys[0]


def _parse_peers(texts: list[str]) -> tuple[Address, ...]:
    if len(texts) > MAX_PEER_HOSTS:
        raise ConfigError(f"{FLAG_PEERS} is given {len(texts)} times; the limit is {MAX_PEER_HOSTS}")
    found: dict[Address, None] = {}
    for text in texts:
        address = _read_address(_ADDRESS.fullmatch(text))
        if address is None:
            raise ConfigError(f"{FLAG_PEERS} {text!r} is not HOST:PORT")
        found[address] = None
    return tuple(found)


def _read_address(match: re.Match[str] | None) -> Address | None:
    """Return the address in a match of ``_ADDRESS``, None if there is no match or no such port."""
    if match is None or not 0 < int(match["port"]) <= 65535:
        return None
    return Address(match["host"].strip("[]"), int(match["port"]))


def _parse_backends(texts: list[str]) -> dict[str, tuple[Address, ...]]:
    if len(texts) > MAX_BACKENDS:
        raise ConfigError(f"--backend is given {len(texts)} times; the limit is {MAX_BACKENDS}")
    found: dict[str, dict[Address, None]] = {}
    for text in texts:
        match = _BACKEND.fullmatch(text)
        address = _read_address(match)
        if match is None or address is None:
            raise ConfigError(f"--backend {text!r} is not MODEL=http://HOST:PORT")
        found.setdefault(match["model"], {})[address] = None
    return {model: tuple(addresses) for model, addresses in found.items()}
