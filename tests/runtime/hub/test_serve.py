"""A server downloads a model from a hub and converts its tokenizer once, and then needs no hub."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fake_hub import running_hub
from foreign_tokenizers import write_sentencepiece
from sentencepiece import SentencePieceProcessor
from tiny_models import make_model

from skiff_runtime.config import Config
from skiff_runtime.processes.local_server import LocalServer
from skiff_runtime.processes.resolve import resolve

pytestmark = pytest.mark.integration

TEXT = "The boat, Köln 🙂"


def write_hub_model(directory: Path) -> SentencePieceProcessor:
    """Write a model with only a SentencePiece tokenizer and a chat template, and return the tokenizer."""
    model = make_model(directory, vocab_size=420)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    write_sentencepiece(model / "tokenizer.model")
    (model / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    return SentencePieceProcessor(model_file=str(model / "tokenizer.model"))


def test_server_downloads_and_converts_a_hub_model_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = write_hub_model(tmp_path / "hub" / "acme" / "tiny")
    cache = tmp_path / "cache"
    flags = ["--model", "hf://acme/tiny", "--download-dir", str(cache), "--cpu-threads", "1"]
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with (
            LocalServer([*flags, "--max-total-tokens", "4096"]) as server,
            httpx.Client(base_url=server.url, timeout=60) as client,
        ):
            assert "fetch_finished" in server.log_text() and "tokenizer_converted" in server.log_text()
            ids = client.post("/tokenize", json={"prompt": TEXT}).json()["tokens"]
            assert ids == [pieces.bos_id(), *pieces.encode(TEXT)]
            request = {"model": "tiny", "prompt": TEXT, "max_tokens": 8, "temperature": 0}
            completion = client.post("/v1/completions", json=request).json()
            assert completion["usage"]["prompt_tokens"] == len(ids)
            structured = client.post("/v1/completions", json={**request, "guided_regex": "boat|pod"}).json()
            assert structured["choices"][0]["text"] in ("boat", "pod")
            chat = [sys.executable, "-m", "skiff_runtime", "chat", "--url", server.url, "--model", "tiny"]
            done = subprocess.run(
                [*chat, "--temperature", "0", "--max-tokens", "32"],
                input="hello\n",
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()
    _, model = resolve(Config(model="hf://acme/tiny", download_dir=str(cache)))
    assert model.path.parent == cache / "models--acme--tiny" / "snapshots"
    assert model.tokenizer_path is not None and model.tokenizer_path.is_relative_to(cache / "tokenizers")
