"""Makes LoRA adapters of random weights for the peers, the same as those of ``skiff bench offline --lora-adapters``.

python tests/peers/make_adapters.py llama-3.1-8b DIRECTORY --count 16 --rank 16
"""

import argparse
from pathlib import Path

from skiff_runtime import shapes
from skiff_runtime.bench.offline.random_adapters import write_random_adapters
from skiff_runtime.models.config import read_model_config


def main() -> None:
    """Write the adapters of a shape into a new directory, each into one of its own: 0, 1, 2 and so on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    model = read_model_config(shapes.find(shapes.SCHEME + arguments.shape))
    arguments.directory.mkdir(parents=True)
    write_random_adapters(arguments.directory, model, count=arguments.count, rank=arguments.rank, seed=0)


if __name__ == "__main__":
    main()
