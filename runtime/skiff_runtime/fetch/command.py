"""The command ``skiff fetch``: download a model before a server needs it."""

import argparse
import os
import secrets
import signal
import time
from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.config.arguments import add_renamed_flags
from skiff_runtime.config.cache_dirs import tokenizer_cache_dirs
from skiff_runtime.contract import (
    ENV_GS_CREDENTIALS,
    ENV_HUB_ENDPOINT,
    ENV_HUB_TOKEN,
    ENV_OCI_CREDENTIALS,
    ENV_OCI_ENDPOINT,
    ENV_PEER_TOKEN,
    ENV_S3_ENDPOINT,
    ENV_S3_KEY_ID,
    ENV_S3_SECRET_KEY,
    ENV_S3_SESSION_TOKEN,
    EXIT_FETCH_FAILED,
    EXIT_OK,
    FLAG_ADAPTER_ONLY,
    FLAG_DOWNLOAD_DIR,
    FLAG_HOST,
    FLAG_MODEL,
    FLAG_PEER,
    FLAG_REVISION,
    FLAG_SERVE_PEERS,
    FLAG_WAIT,
)
from skiff_runtime.conversion.tokenizer_json import find_or_convert_tokenizer
from skiff_runtime.errors import ConfigError, FetchError, ModelError
from skiff_runtime.hub.fetch import Peers, default_hub_cache, disk_errors
from skiff_runtime.hub.hub_reference import DEFAULT_REVISION
from skiff_runtime.sources.fetch import fetch_model, is_remote, wait_for_model

CHECK_SECONDS: Final = 30.0
"""Seconds between two looks at the files of a model that is offered to peers."""

DESCRIPTION: Final = "Download a model from a Hugging Face hub, an object store or a registry into a cache, and verify it. Concurrent runs share one download."
EPILOG: Final = f"""\
Only the files that serving needs are downloaded: configuration, tokenizer, chat
template and safetensors weights, or one GGUF file of a hub. The model's directory, or
its GGUF file, is printed to standard output.
A model that is complete in the cache needs no network; to update a branch, pass the
new commit as {FLAG_REVISION}; to update a bucket or a tag, use another path or tag.

environment of peers:
  {ENV_PEER_TOKEN} secret of at least 16 characters that peers share

environment of hf://, as for all tools of the hub:
  {ENV_HUB_TOKEN}         token for gated and private models; sent only to the hub
  HF_TOKEN_PATH    file with the token (default: token in HF_HOME)
  {ENV_HUB_ENDPOINT}      address of another hub (default: https://huggingface.co)
  HF_HUB_CACHE     directory of the models without {FLAG_DOWNLOAD_DIR}
  HF_HUB_OFFLINE   1: use the cache only; fail if the model is not complete in it
  HTTPS_PROXY      proxy; NO_PROXY lists the hosts to reach without it

environment of s3://, as for Amazon's tools; without keys, a workload identity is used:
  {ENV_S3_KEY_ID}, {ENV_S3_SECRET_KEY}, {ENV_S3_SESSION_TOKEN}
  AWS_REGION             region of the bucket (default: us-east-1)
  {ENV_S3_ENDPOINT}       address of another S3 service
  AWS_SKIP_SIGNATURE     true: a public bucket

environment of gs://; without a key, a workload identity is used:
  {ENV_GS_CREDENTIALS}      text of a service account's key
  GOOGLE_APPLICATION_CREDENTIALS  file with it
  GOOGLE_SKIP_SIGNATURE           true: a public bucket

environment of oci://:
  {ENV_OCI_CREDENTIALS}  text of a Docker configuration with the registry's password
                      (default: config.json in DOCKER_CONFIG or ~/.docker)
  {ENV_OCI_ENDPOINT}        address of the registry, such as a mirror or http://...

examples:
  skiff fetch {FLAG_MODEL} hf://Qwen/Qwen3-0.6B
  skiff fetch {FLAG_MODEL} hf://Qwen/Qwen3-0.6B-GGUF:Q8_0
  skiff fetch {FLAG_MODEL} hf://meta-llama/Llama-3.1-8B-Instruct {FLAG_DOWNLOAD_DIR} /models
  skiff fetch {FLAG_MODEL} s3://models/llama-3.1-8b {FLAG_DOWNLOAD_DIR} /models
  skiff fetch {FLAG_MODEL} oci://ghcr.io/org/llama:v1 {FLAG_DOWNLOAD_DIR} /models
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff fetch``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        FLAG_MODEL,
        required=True,
        metavar="URI",
        help="the model: hf://org/name, or hf://org/name:Q4_K_M for a GGUF file; s3://bucket/prefix, "
        "gs://bucket/prefix, or oci://registry/repository:tag",
    )
    parser.add_argument(
        FLAG_REVISION,
        default=None,
        metavar="NAME",
        help=f"branch, tag or commit of an hf:// model (default: {DEFAULT_REVISION})",
    )
    parser.add_argument(
        FLAG_DOWNLOAD_DIR,
        type=Path,
        default=None,
        metavar="DIR",
        help="directory of the models (default: $HF_HUB_CACHE, or ~/.cache/huggingface/hub)",
    )
    parser.add_argument(
        FLAG_PEER,
        action="append",
        default=[],
        metavar="URL",
        help=f"another {FLAG_SERVE_PEERS} that has the model, as http://HOST:PORT; it is asked before the source; may be repeated",
    )
    parser.add_argument(
        FLAG_SERVE_PEERS,
        type=int,
        default=None,
        metavar="PORT",
        help="send the files to peers, and keep running when the model is complete",
    )
    parser.add_argument(
        FLAG_HOST,
        default="0.0.0.0",
        metavar="ADDRESS",
        help=f"address of {FLAG_SERVE_PEERS} (default: 0.0.0.0)",
    )
    parser.add_argument(
        FLAG_WAIT,
        action="store_true",
        help="download nothing: wait until another process has completed the model in the directory, which may be read-only",
    )
    parser.add_argument(
        FLAG_ADAPTER_ONLY,
        action="store_true",
        help="fail before the download if the source is not a LoRA adapter; files that are already in the directory are not "
        "checked",
    )
    add_renamed_flags(parser, {"--cache-dir": FLAG_DOWNLOAD_DIR})


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model, print its directory, and return the exit code. Raises ``ConfigError`` for a malformed flag."""
    log.configure("fetch", "info")
    # PID 1 of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reference: str = arguments.model
    if not is_remote(reference):
        raise ConfigError(
            f"{FLAG_MODEL} {reference}: only models of hf://, s3://, gs:// and oci:// are downloaded"
        )
    peers = _peers(arguments)
    try:
        if arguments.serve_peers is not None:
            return _fetch_and_serve(arguments, peers)
        path = _fetch(arguments, peers)
    except FetchError as error:
        log.error("fetch_failed", model=reference, message=str(error))
        return EXIT_FETCH_FAILED
    except KeyboardInterrupt:
        log.error("fetch_failed", model=reference, message="interrupted; complete files are kept")
        return EXIT_FETCH_FAILED
    print(path)
    return EXIT_OK


def _peers(arguments: argparse.Namespace) -> Peers | None:
    """Return the peers of the flags. Raises ``ConfigError`` for a malformed address, and for peers without a token."""
    if arguments.adapter_only and (arguments.wait or arguments.peer or arguments.serve_peers is not None):
        raise ConfigError(
            f"{FLAG_ADAPTER_ONLY} looks at the source; omit {FLAG_WAIT}, {FLAG_PEER} and {FLAG_SERVE_PEERS}"
        )
    if arguments.wait and (arguments.peer or arguments.serve_peers is not None):
        raise ConfigError(f"{FLAG_WAIT} downloads nothing; omit {FLAG_PEER} and {FLAG_SERVE_PEERS}")
    if not arguments.peer and arguments.serve_peers is None:
        return None
    # Imported only with peers: it needs an HTTP library.
    from skiff_runtime.hub.peer_protocol import check_peers

    token = os.environ.get(ENV_PEER_TOKEN, "")
    if not token and not arguments.peer:
        # The server still reports its progress; no peer knows this token, so files are sent to none.
        token = secrets.token_urlsafe()
        log.event("peer_server_private", reason=f"{ENV_PEER_TOKEN} is not set: files are sent to no peer")
    check_peers(arguments.peer, token)
    return Peers(tuple(arguments.peer), token)


def _fetch(arguments: argparse.Namespace, peers: Peers | None) -> Path:
    """Fetch the model, or wait for it, and convert its tokenizer. Raises ``FetchError``."""
    cache_dir = arguments.download_dir or default_hub_cache()
    if arguments.wait:
        path = wait_for_model(arguments.model, arguments.revision, cache_dir)
    else:
        path = fetch_model(
            arguments.model, arguments.revision, cache_dir, peers=peers, adapter_only=arguments.adapter_only
        )
    try:
        find_or_convert_tokenizer(path, tokenizer_cache_dirs(arguments.download_dir))
    except ModelError as error:  # the server reports it again, and exits
        log.warning("tokenizer_conversion_failed", model=arguments.model, message=str(error))
    return path


def _fetch_and_serve(arguments: argparse.Namespace, peers: Peers | None) -> int:
    """Fetch the model and offer it to peers until SIGTERM. Raises ``FetchError``, also when its files disappear."""
    from skiff_runtime.fetch.peer_server import PeerServer, offered_model

    assert peers is not None, "a server has a token"
    cache_dir = arguments.download_dir or default_hub_cache()
    address = {"host": arguments.host, "port": arguments.serve_peers}
    model = offered_model(arguments.model, arguments.revision, cache_dir)
    with PeerServer(model, token=peers.token, **address) as server:
        path = _fetch(arguments, peers)
        with disk_errors(cache_dir):
            model.prepare()
        print(path, flush=True)
        try:
            while server.offer():
                time.sleep(CHECK_SECONDS)
        except KeyboardInterrupt:
            return EXIT_OK
    raise FetchError(f"files of the model have disappeared from {cache_dir}; a new start fetches them again")
