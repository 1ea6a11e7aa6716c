"""Agreement of FP8 with bfloat16: how often both have the same most likely next token, on random models and texts.

PYTHONPATH=runtime:tests/support python tests/support/agreement.py [--device cuda]

Every position of a text counts, so one difference does not bring others with it, as it would in a generated answer.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
from tiny_models import FAMILIES, make_model
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.offline.llm import LLM
from skiff_runtime.offline.sampling_params import SamplingParams

CONFIGURATIONS: Final[dict[str, dict[str, Any]]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "FP8 weights": {"dtype": "bfloat16", "quantization": "fp8"},
    "FP8 KV cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
    "both": {"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}
"""The others are compared with the first."""
WIDE: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 6,
}
LENGTH: Final = 200


def likeliest(model: Path, device: str, options: dict[str, Any], prompts: list[list[int]]) -> list[int]:
    """The likeliest token behind every token of the prompts but their last."""
    with LLM(str(model), device=device, **options) as llm:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0.0)
        done = llm.generate(prompts, sampling)
    return [
        each.top[0].token_id for told in done for each in told.prompt_logprobs if each.logprob is not None
    ]


def main() -> None:
    """Print a line for each configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=16, help="texts for each model (default: %(default)s)")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    found: dict[str, list[int]] = {name: [] for name in CONFIGURATIONS}
    for seed, family in enumerate(FAMILIES):
        prompts = [rng.integers(2, VOCAB_SIZE, LENGTH).tolist() for _ in range(arguments.count)]
        with tempfile.TemporaryDirectory() as directory:
            model = make_model(Path(directory), family, seed=seed, **WIDE)
            for name, options in CONFIGURATIONS.items():
                found[name] += likeliest(model, arguments.device, options, prompts)
    first = next(iter(found.values()))
    for name, tokens in found.items():
        same = sum(a == b for a, b in zip(tokens, first, strict=True)) / len(first)
        print(f"{name:12}  the same likeliest token as in bfloat16 {same:.2%} of {len(first)}", flush=True)


if __name__ == "__main__":
    main()
