"""Makes a model directory without weights for the peers: a shape of Skiff, with a tokenizer that transformers loads.

python tests/peers/make_model_dir.py qwen3-14b DIRECTORY
"""

import json
import shutil
import sys
from pathlib import Path

from skiff_runtime import shapes

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": "{{ messages[0].content }}",
    "model_max_length": 40960,
}


def make_model_dir(shape: str, directory: Path) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json of ``shape`` to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    source = shapes.find(shapes.SCHEME + shape)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(source / name, directory / name)
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1))


if __name__ == "__main__":
    make_model_dir(sys.argv[1], Path(sys.argv[2]))
