"""The configuration of a model that has no weights: enough for the processes that never compute."""

import json
from pathlib import Path

from tiny_tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE


def write_config(directory: Path) -> None:
    """Write a small Llama's ``config.json``."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
