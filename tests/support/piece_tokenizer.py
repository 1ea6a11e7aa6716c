"""A small real tokenizer that is not byte-level: pieces with a visible space and byte fallback, as in Llama 2 and Mistral."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, normalizers, trainers

_SENTENCES: Final = (
    "The small boat crosses the harbour before the morning wind begins to blow.",
    "A pod starts, a service answers, and the operator watches both of them.",
)


def write_piece_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json``. Characters that the training sentences lack become byte tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special + pieces, show_progress=False)
    tokenizer.train_from_iterator([s.replace(" ", "▁") for s in _SENTENCES], trainer)
    saved = json.loads(tokenizer.to_str())
    saved["added_tokens"] = saved["added_tokens"][: len(special)]
    (directory / "tokenizer.json").write_text(json.dumps(saved))
