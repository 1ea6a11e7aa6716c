"""The tokenizer.json of a model: its own, or one converted from SentencePiece or tiktoken files or a GGUF file's metadata.

A conversion needs transformers, which no process of the service imports, so a child process converts before they start.
The result is cached under a digest of its source files, never in the model's directory.
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
from skiff_runtime.contract import FLAG_DOWNLOAD_DIR
from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.header import is_gguf, read_header

TOKENIZER: Final = "tokenizer.json"
SOURCES: Final = ("tokenizer.model", "*.tiktoken", "tiktoken.model", "tekken.json", "vocab.json")
"""Files that a conversion can start from, in the order of preference."""
CONVERSION_SECONDS: Final = 600.0
"""Time limit of a conversion. The largest vocabularies take half a minute."""
_RELATED_FILES: Final = (
    "merges.txt",
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_CHILD_MODULE: Final = "skiff_runtime.conversion.convert_tokenizer"


def find_or_convert_tokenizer(model: Path, caches: Sequence[Path]) -> Path:
    """Return the directory with the tokenizer.json of ``model``: itself, or that of a converted tokenizer in a cache.

    A new conversion goes into the first of ``caches`` that is writable. Returns ``model`` if there is nothing to convert
    either. Raises ``ModelError`` if the conversion fails.
    """
    source = find_source(model)
    if (model / TOKENIZER).is_file() or source is None:
        return model
    name = _digest(model, source)
    directories = [cache / "tokenizers" / name for cache in caches]
    for directory in directories:
        if (directory / TOKENIZER).is_file():
            return directory
    return _convert(model, source, directories)


def find_source(model: Path) -> Path | None:
    """Return the file of ``model`` from which its tokenizer.json can be converted; a GGUF file contains its own."""
    if is_gguf(model) and model.is_file():
        return model
    return next((path for glob in SOURCES for path in sorted(model.glob(glob)) if path.is_file()), None)


def _digest(model: Path, source: Path) -> str:
    """Return the name of the conversion of these files by this version of transformers."""
    running = hashlib.sha256(f"1 {version('transformers')}".encode())
    if is_gguf(source):
        running.update(read_header(source).digest.encode())
        return running.hexdigest()[:32]
    for path in (source, *(model / name for name in _RELATED_FILES)):
        content = path.read_bytes() if path.is_file() else b""
        running.update(f"\0{path.name} {len(content)}\0".encode() + content)
    return running.hexdigest()[:32]


def _convert(model: Path, source: Path, directories: Sequence[Path]) -> Path:
    failures = []
    for directory in directories:
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=directory.parent))
        except OSError as error:
            failures.append(f"{directory.parent}: {error.strerror}")
            continue
        try:
            _run_child(model, source, scratch)
            scratch.chmod(0o755)
            return _publish(scratch, directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    raise ModelError(
        f"{model} has no {TOKENIZER}, and no cache directory is writable for one converted from {source.name} "
        f"({'; '.join(failures)}); make a {FLAG_DOWNLOAD_DIR} writable"
    )


def _publish(scratch: Path, directory: Path) -> Path:
    """Rename the result to its final name, unless another process was first."""
    try:
        scratch.rename(directory)
    except OSError:
        if not (directory / TOKENIZER).is_file():
            raise
    return directory


def _run_child(model: Path, source: Path, scratch: Path) -> None:
    log.event("tokenizer_conversion_started", source=source)
    command = [sys.executable, "-m", _CHILD_MODULE, str(model), str(source), str(scratch)]
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
            f"the conversion of {source} to a {TOKENIZER} took longer than {CONVERSION_SECONDS:.0f} s"
        ) from None
    if done.returncode != 0 or not (scratch / TOKENIZER).is_file():
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelError(
            f"{model} has no {TOKENIZER}, and {source.name} cannot be converted to one: {reason}"
        )
    log.event("tokenizer_converted", source=source)
