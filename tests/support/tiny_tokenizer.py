"""A small real tokenizer: byte-level BPE trained on a few sentences, with a chat template."""

import json
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE: Final = 389
"""Odd on purpose: it is not divisible by two ranks."""

BOS: Final = "<|begin|>"
EOS: Final = "<|end|>"
BOS_ID: Final = 0
EOS_ID: Final = 1

_SENTENCES: Final = (
    "The small boat crosses the harbour before the morning wind begins to blow.",
    "A pod starts, a service answers, and the operator watches both of them.",
    "Tokens stream one after another until the model has said what it wanted to say.",
    "Grüße aus Köln, 東京の朝, naïve café, and a few emoji: 🙂🚀.",
    "numbers 0123456789 and code: for i in range(10): print(i)",
)
_CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with at most ``VOCAB_SIZE`` entries.

    As with Llama, plain text gets a BOS from the tokenizer, and the chat template writes BOS itself.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[BOS, EOS, "<|system|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]),
        ]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "model_max_length": 512,
                "chat_template": _CHAT_TEMPLATE,
            }
        )
    )
