"""Makes a model directory without weights for the peers: a shape of Skiff, with a tokenizer that transformers loads.

python tests/peers/make_model_dir.py qwen3-14b DIRECTORY

With ``--words`` the tokenizer takes each word of ``skiff bench serve --backend openai-chat`` for one token, and every token of the
vocabulary for a word, so that servers which take no token ids can be sent prompts of known lengths.
"""

import argparse
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from skiff_runtime import shapes
from skiff_runtime.bench.workload import WORDS

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": "{{ messages[0].content }}",
    "model_max_length": 40960,
}


def make_model_dir(shape: str, directory: Path, *, words: bool) -> None:
    """Write config.json, tokenizer.json and tokenizer_config.json of ``shape`` to ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    source = shapes.find(shapes.SCHEME + shape)
    shutil.copyfile(source / "config.json", directory / "config.json")
    if words:
        make_word_tokenizer(json.loads((source / "config.json").read_text())["vocab_size"]).save(
            str(directory / "tokenizer.json")
        )
    else:
        shutil.copyfile(source / "tokenizer.json", directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG, indent=1))


def make_word_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of whole words. Its first tokens are the words of the benchmark's prompts."""
    names = [*WORDS, *(f"word{number}" for number in range(vocab_size - len(WORDS)))]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=WORDS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--words", action="store_true")
    arguments = parser.parse_args()
    make_model_dir(arguments.shape, arguments.directory, words=arguments.words)
