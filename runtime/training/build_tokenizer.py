"""Trains the demo model's tokenizer, a byte-level BPE, on the corpus and writes its files into the model folder."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from conversations import off_topic_question
from corpus import facts, passages, phrasing
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

MODEL = Path(__file__).parents[1] / "skiff_runtime" / "demo"
PAD, BOS, EOS, END = "<|pad|>", "<|bos|>", "<|eos|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL = (PAD, BOS, EOS, END, *(f"<|{role}|>" for role in ROLES))
CONTEXT_TOKENS = 2048

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}
{{- content | trim -}}
{%- elif content -%}
{%- for part in content if part['type'] == 'text' -%}{{- part['text'] | trim -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro signature(function) -%}
{%- set schema = function['parameters'] or {} -%}
{%- set required = schema['required'] or [] -%}
{{- function['name'] + '(' -}}
{%- for name, member in (schema['properties'] or {}).items() -%}
{{- name -}}
{%- if name not in required -%}{{- '?' -}}{%- endif -%}
{%- if member['type'] is string and member['type'] != 'string' -%}{{- ': ' + member['type'] -}}{%- endif -%}
{%- if not loop.last -%}{{- ', ' -}}{%- endif -%}
{%- endfor -%}
{{- ')' -}}
{%- set description = (function['description'] or '') | trim -%}
{%- if description -%}{{- ': ' + description -}}{%- endif -%}
{%- endmacro -%}
{%- macro signatures() -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}{{- '\\n' + signature(tool['function']) -}}{%- endfor -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools and messages[0]['role'] != 'system' -%}
{{- '<|system|>' + signatures() + '<|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{{- '\\n' if loop.previtem and loop.previtem['role'] == 'tool' else '<|user|>' -}}
{{- '<tool_response>' + text(message['content']) + '</tool_response>' -}}
{%- if loop.last or loop.nextitem['role'] != 'tool' -%}{{- '<|end|>' -}}{%- endif -%}
{%- elif message['role'] in ('system', 'user', 'assistant') -%}
{%- set content = text(message['content']) -%}
{{- '<|' + message['role'] + '|>' + content -}}
{%- if tools and loop.first and message['role'] == 'system' -%}
{{- ('\\n' if content else '') + signatures() -}}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '\\n' if content or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' -}}
{%- set arguments = call['function']['arguments'] -%}
{{- arguments if arguments is string else arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- else -%}
{{- raise_exception('The role of a message must be system, user, assistant or tool.') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def texts(*, seed: int, samples: int) -> Iterator[str]:
    """The text from which merges are learned: answers, questions as they are and in lower case, off-topic questions, passages.

    Typing errors and invented words stay out, so that merges are spent on real words.
    """
    rng = random.Random(seed)
    for fact in facts().values():
        yield from (fact.answer, fact.more or "") * 8
        yield from fact.questions
        yield from (question.lower() for question in fact.questions)
    for _ in range(samples):
        yield off_topic_question(rng, kinds=("questions", "borrowed", "plain"))
    for name in ("before", "after", "more", "again", "system", "brief", "fillers"):
        yield from phrasing()[name] * 20
    yield from passages() * 8


def build(*, vocabulary: int, seed: int, samples: int) -> Tokenizer:
    """A tokenizer of exactly `vocabulary` entries that encodes any text and gives it back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(seed=seed, samples=samples), trainer)
    begin = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[begin]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """`add_bos_token` speaks of plain text; the chat template writes BOS itself, so a rendered chat is encoded without."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_TOKENS,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def save(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=MODEL, help="model folder to write into (default: the shipped one)"
    )
    parser.add_argument(
        "--vocabulary", type=int, default=2560, help="entries, special tokens included (default: 2560)"
    )
    parser.add_argument(
        "--samples", type=int, default=10000, help="off-topic questions to learn from (default: 10000)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    tokenizer = build(vocabulary=options.vocabulary, seed=options.seed, samples=options.samples)
    save(tokenizer, options.out)
    print(f"wrote {options.out}/tokenizer.json: {tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
