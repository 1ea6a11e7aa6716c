"""``skiff fetch``: download an ``hf://`` model before anything serves it."""

import argparse
import signal
from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.config.arguments import add_renamed_flags
from skiff_runtime.config.cache_dirs import tokenizer_cache_dirs
from skiff_runtime.contract import (
    ENV_HUB_ENDPOINT,
    ENV_HUB_TOKEN,
    EXIT_FETCH_FAILED,
    EXIT_OK,
    FLAG_DOWNLOAD_DIR,
    FLAG_MODEL,
    FLAG_REVISION,
)
from skiff_runtime.conversion.tokenizer_json import find_or_convert_tokenizer
from skiff_runtime.errors import FetchError, ModelError
from skiff_runtime.hub.fetch import default_hub_cache, fetch
from skiff_runtime.hub.hub_reference import DEFAULT_REVISION, parse_reference

DESCRIPTION: Final = "Download a model from a Hugging Face hub: verified, safe to run twice at a time, kept in the hub's cache."
EPILOG: Final = f"""\
Only what serving needs is downloaded: configuration, tokenizer, chat template and
safetensors weights. The directory of the model is printed to standard output. A model
that is complete in the cache is left as it is, without any network; to move on to what
a branch means now, name the commit as {FLAG_REVISION}.

environment, as of all tools of the hub:
  {ENV_HUB_TOKEN}         token for gated and private models; sent to the hub alone
  HF_TOKEN_PATH    file with the token (default: token in HF_HOME)
  {ENV_HUB_ENDPOINT}      address of another hub (default: https://huggingface.co)
  HF_HUB_CACHE     where models are kept without {FLAG_DOWNLOAD_DIR}
  HF_HUB_OFFLINE   1: what the cache holds, or an error
  HTTPS_PROXY      the proxy, and NO_PROXY what goes without

examples:
  skiff fetch {FLAG_MODEL} hf://Qwen/Qwen3-0.6B
  skiff fetch {FLAG_MODEL} hf://meta-llama/Llama-3.1-8B-Instruct {FLAG_DOWNLOAD_DIR} /models
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff fetch``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(FLAG_MODEL, required=True, metavar="URI", help="the model: hf://org/name")
    parser.add_argument(
        FLAG_REVISION,
        default=None,
        metavar="NAME",
        help=f"branch, tag or commit (default: {DEFAULT_REVISION})",
    )
    parser.add_argument(
        FLAG_DOWNLOAD_DIR,
        type=Path,
        default=None,
        metavar="DIR",
        help="where models are kept (default: $HF_HUB_CACHE, or ~/.cache/huggingface/hub)",
    )
    add_renamed_flags(parser, {"--cache-dir": FLAG_DOWNLOAD_DIR})


def run(arguments: argparse.Namespace) -> int:
    """Fetch, print the model's directory, and return the exit code. ConfigError for a malformed flag."""
    log.configure("fetch", "info")
    # As PID 1 of a container a process ignores SIGTERM unless it says otherwise.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reference = parse_reference(arguments.model, arguments.revision)
    try:
        path = fetch(reference, arguments.download_dir or default_hub_cache())
        find_or_convert_tokenizer(path, tokenizer_cache_dirs(arguments.download_dir))
    except FetchError as error:
        log.error("fetch_failed", model=reference, message=str(error))
        return EXIT_FETCH_FAILED
    except KeyboardInterrupt:
        log.error("fetch_failed", model=reference, message="interrupted; files that are whole are kept")
        return EXIT_FETCH_FAILED
    except ModelError as error:  # the server says so again, and ends
        log.warning("tokenizer_conversion_failed", model=reference, message=str(error))
    print(path)
    return EXIT_OK
