"""Random LoRA adapters in the files that peft writes. It needs the standard library alone, and is a program for pods, too:

python3 adapter_files.py CONFIG DIRECTORY SEED RANK
"""

import json
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

SPREAD: Final = 0.1
"""Standard deviation of both matrices: with the scale below, greedy answers differ from the model's after a few tokens."""
SCALE: Final = 4


def write_adapter(config: Path, directory: Path, *, seed: int, rank: int) -> None:
    """Write an adapter of q_proj and v_proj in float32 for the model of a config.json."""
    model: dict[str, Any] = json.loads(config.read_text())
    directory.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": SCALE * rank,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "base_model_name_or_path": "",
    }
    numbers = random.Random(seed)
    header: dict[str, Any] = {}
    data = bytearray()
    for name, rows, columns in _matrices(model, rank):
        values = [numbers.gauss(0.0, SPREAD) for _ in range(rows * columns)]
        begin = len(data)
        data += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (directory / "adapter_config.json").write_text(json.dumps(settings))


def _matrices(model: dict[str, Any], rank: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, rows and columns of each matrix."""
    hidden = model["hidden_size"]
    head = model.get("head_dim") or hidden // model["num_attention_heads"]
    outputs = {
        "q_proj": head * model["num_attention_heads"],
        "v_proj": head * model["num_key_value_heads"],
    }
    for layer in range(model["num_hidden_layers"]):
        for projection, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            yield f"{prefix}.lora_A.weight", rank, hidden
            yield f"{prefix}.lora_B.weight", size, rank


if __name__ == "__main__":
    write_adapter(Path(sys.argv[1]), Path(sys.argv[2]), seed=int(sys.argv[3]), rank=int(sys.argv[4]))
