"""The command ``skiff fetch``: download a model before a server needs it."""

import argparse
import signal
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
    ENV_S3_ENDPOINT,
    ENV_S3_KEY_ID,
    ENV_S3_SECRET_KEY,
    ENV_S3_SESSION_TOKEN,
    EXIT_FETCH_FAILED,
    EXIT_OK,
    FLAG_DOWNLOAD_DIR,
    FLAG_MODEL,
    FLAG_REVISION,
)
from skiff_runtime.conversion.tokenizer_json import find_or_convert_tokenizer
from skiff_runtime.errors import ConfigError, FetchError, ModelError
from skiff_runtime.hub.fetch import default_hub_cache
from skiff_runtime.hub.hub_reference import DEFAULT_REVISION
from skiff_runtime.sources.fetch import fetch_model, is_remote

DESCRIPTION: Final = "Download a model from a Hugging Face hub, an object store or a registry into a cache, and verify it. Concurrent runs share one download."
EPILOG: Final = f"""\
Only the files that serving needs are downloaded: configuration, tokenizer, chat
template and safetensors weights, or one GGUF file of a hub. The model's directory, or
its GGUF file, is printed to standard output.
A model that is complete in the cache needs no network; to update a branch, pass the
new commit as {FLAG_REVISION}; to update a bucket or a tag, use another path or tag.

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
    add_renamed_flags(parser, {"--cache-dir": FLAG_DOWNLOAD_DIR})


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model, print its directory, and return the exit code. Raises ``ConfigError`` for a malformed flag."""
    log.configure("fetch", "info")
    # PID 1 of a container ignores SIGTERM unless it has a handler.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reference = arguments.model
    if not is_remote(reference):
        raise ConfigError(
            f"{FLAG_MODEL} {reference}: only models of hf://, s3://, gs:// and oci:// are downloaded"
        )
    try:
        path = fetch_model(reference, arguments.revision, arguments.download_dir or default_hub_cache())
        find_or_convert_tokenizer(path, tokenizer_cache_dirs(arguments.download_dir))
    except FetchError as error:
        log.error("fetch_failed", model=reference, message=str(error))
        return EXIT_FETCH_FAILED
    except KeyboardInterrupt:
        log.error("fetch_failed", model=reference, message="interrupted; complete files are kept")
        return EXIT_FETCH_FAILED
    except ModelError as error:  # the server reports it again, and exits
        log.warning("tokenizer_conversion_failed", model=reference, message=str(error))
    print(path)
    return EXIT_OK
