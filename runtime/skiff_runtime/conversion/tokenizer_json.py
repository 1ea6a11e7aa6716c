"""The place of a model's tokenizer.json: its own, or one that is converted from SentencePiece or tiktoken files.

A conversion needs transformers, which no process of a service imports, so it runs in a child process before they
start. Its result is kept under a digest of the files that it was made from, never in the model's own directory.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.errors import ModelError

TOKENIZER: Final = "tokenizer.json"
SOURCES: Final = ("tokenizer.model", "*.tiktoken", "tiktoken.model", "tekken.json", "vocab.json")
"""File names that a conversion starts from, the first that is there."""
CONVERSION_SECONDS: Final = 600.0
"""The longest vocabularies take half a minute."""
_OTHERS: Final = (
    "merges.txt",
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_CHILD: Final = "skiff_runtime.conversion.convert_tokenizer"


def find_or_convert_tokenizer(model: Path, caches: Sequence[Path]) -> Path:
    """Return the directory with the model's tokenizer.json: ``model``, or that of one converted into a cache.

    The first of ``caches`` that can be written to takes a new one; any that has it already serves. ``model`` where
    there is nothing to convert either. Raises ``ModelError`` where a conversion fails.
    """
    source = find_source(model)
    if (model / TOKENIZER).is_file() or source is None:
        return model
    name = _digest(model, source)
    places = [cache / "tokenizers" / name for cache in caches]
    for place in places:
        if (place / TOKENIZER).is_file():
            return place
    return _convert(model, source, places)


def find_source(model: Path) -> Path | None:
    """Return the file of ``model`` that its tokenizer.json can be converted from."""
    return next((path for glob in SOURCES for path in sorted(model.glob(glob)) if path.is_file()), None)


def _digest(model: Path, source: Path) -> str:
    """Return a name for the conversion of these files by this version of transformers."""
    running = hashlib.sha256(f"1 {version('transformers')}".encode())
    for path in (source, *(model / name for name in _OTHERS)):
        content = path.read_bytes() if path.is_file() else b""
        running.update(f"\0{path.name} {len(content)}\0".encode() + content)
    return running.hexdigest()[:32]


def _convert(model: Path, source: Path, places: Sequence[Path]) -> Path:
    failures = []
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=place.parent))
        except OSError as error:
            failures.append(f"{place.parent}: {error.strerror}")
            continue
        try:
            _run_child(model, source, scratch)
            scratch.chmod(0o755)
            return _publish(scratch, place)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    raise ModelError(
        f"{model} has no {TOKENIZER}, and there is no place for one converted from {source.name} "
        f"({'; '.join(failures)}); make a --download-dir writable"
    )


def _publish(scratch: Path, place: Path) -> Path:
    """Give the result its name, unless another process was first."""
    try:
        scratch.rename(place)
    except OSError:
        if not (place / TOKENIZER).is_file():
            raise
    return place


def _run_child(model: Path, source: Path, scratch: Path) -> None:
    log.event("tokenizer_conversion_started", source=source)
    command = [sys.executable, "-m", _CHILD, str(model), str(source), str(scratch)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=CONVERSION_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"{source} was not converted to a {TOKENIZER} within {CONVERSION_SECONDS:.0f} s"
        ) from None
    if done.returncode != 0 or not (scratch / TOKENIZER).is_file():
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(
            f"{model} has no {TOKENIZER}, and {source.name} cannot be converted to one: {reason}"
        )
    log.event("tokenizer_converted", source=source)
