"""A tiny model that is trained to call tools: it has memorized which text follows the last words of a prompt.

Agents decide on their own whether they call a tool, and no request parameter of theirs forces a model to. A model with
random weights never calls one, so this one is trained, in about a minute on a CPU, on ``tests/clients/memorized.toml``:
after a user's last words it writes a call, after the last words of a tool's result it writes the answer, and after any
other words ``OTHERWISE``. Its chat template renders tools, calls and results, system messages first.

A sliding window of ``WINDOW`` tokens in both layers lets it read the last words of a prompt of any length: what agents
write before them cannot change the answer, however long it is.
"""

import hashlib
import json
import random
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import MistralConfig, MistralForCausalLM

MEMORIZED: Final = Path(__file__).parents[1] / "clients/memorized.toml"
"""The table ``[[memory]]``: ``role`` and ``ends`` of the last message, and ``answer`` or ``call`` that follows."""
OTHERWISE: Final = "I have not learned an answer to this."
CONTEXT_TOKENS: Final = 131072
WINDOW: Final = 96
_VOCAB_SIZE: Final = 1536
_ROLES: Final = ("system", "user", "assistant", "tool")
_OPENING: Final = {role: f"<|{role}|>" for role in _ROLES}
_CLOSING: Final = {role: f"<|/{role}|>" for role in _ROLES}
_BOS: Final = "<|begin|>"
_SUFFIXES: Final = ("", "", "", "\n", '"', '"}', '"]', "\n\n", "'", "}", ".", ")", "\n```", "</output>")
"""Texts that clients write after a tool's result; the model has seen all of them."""
_ROWS: Final = 24
_ROW_TOKENS: Final = 224
_MAX_STEPS: Final = 500
_MIN_STEPS: Final = 400
_CHECK_STEPS: Final = 50
_LEARNING_RATE: Final = 3e-3
_IGNORED: Final = -100

_CHAT_TEMPLATE: Final = """\
{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}{%- for part in content if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages if message['role'] in ('system', 'developer') -%}
{{- '<|system|>' + text(message['content']) + '<|/system|>' -}}
{%- endfor -%}
{%- if tools -%}
{{- '<|system|>' -}}{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}{{- '<|/system|>' -}}
{%- endif -%}
{%- for message in messages if message['role'] not in ('system', 'developer') -%}
{{- '<|' + message['role'] + '|>' + text(message['content']) -}}
{%- for call in message['tool_calls'] or [] -%}
{%- set arguments = call['function']['arguments'] -%}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|/' + message['role'] + '|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Memory:
    """The model's output after a last message of ``role`` that ends with ``ends``."""

    role: str
    ends: str
    written: str


def read_memories(path: Path = MEMORIZED) -> list[Memory]:
    """Read the table of what the model memorizes; a ``call`` is written in the Hermes format, as grammars enforce it."""
    found = []
    for row in tomllib.loads(path.read_text())["memory"]:
        written = row.get("answer", "")
        if "call" in row:
            call = json.dumps({"name": row["call"], "arguments": row["arguments"]})
            written += f"<tool_call>\n{call}\n</tool_call>"
        found.append(Memory(row["role"], row["ends"], written))
    return found


def make_memorizing_model(cache: Path) -> Path:
    """Train the model unless ``cache`` has it already, and return its directory."""
    sources = [Path(__file__).read_bytes(), MEMORIZED.read_bytes(), torch.__version__.encode()]
    directory = cache / f"memorizing-model-{hashlib.sha256(b''.join(sources)).hexdigest()[:16]}"
    if directory.exists():
        return directory
    making = directory.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    memories = read_memories()
    lessons = _Lessons(memories, _write_tokenizer(making, memories))
    _train(lessons).save_pretrained(making)
    (making / "generation_config.json").write_text(json.dumps({"temperature": 0.0}))
    making.rename(directory)
    return directory


def _background_text() -> str:
    """The documentation of this repository: English, Markdown and JSON, as what agents write into prompts."""
    docs = Path(__file__).parents[2] / "docs"
    return "\n".join(page.read_text() for page in sorted(docs.glob("*.md")))


def _write_tokenizer(directory: Path, memories: Sequence[Memory]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=[_BOS, *_OPENING.values(), *_CLOSING.values()],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [text for memory in memories for text in (memory.ends, memory.written)]
    tokenizer.train_from_iterator([OTHERWISE, *texts, _background_text()], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS,
        "eos_token": _CLOSING["assistant"],
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return tokenizer


class _Lessons:
    """Draws rows of tokens: text of any kind, a last message that the model knows or not, and what follows it."""

    def __init__(self, memories: Sequence[Memory], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.memories = memories
        self._random = random.Random(0)
        self._background = self._encode(_background_text())

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and labels int64[rows, tokens]; only what the model writes has labels."""
        rows = [self._row() for _ in range(_ROWS)]
        ids = torch.tensor([row[0] for row in rows])
        return ids, torch.tensor([row[1] for row in rows])

    def questions(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield a prompt and what has to follow it, for every memory and suffix."""
        for memory in self.memories:
            for suffix in self._suffixes(memory):
                yield self._question(memory, suffix)

    def _row(self) -> tuple[list[int], list[int]]:
        memory = self._random.choice(self.memories) if self._random.random() < 0.75 else None
        suffix = self._random.choice(self._suffixes(memory)) if memory else ""
        prompt, written = self._question(memory, suffix)
        prompt = prompt[-(_ROW_TOKENS - len(written)) :]
        padding = _ROW_TOKENS - len(prompt) - len(written)  # at the end, where nothing attends to it
        labels = [_IGNORED] * len(prompt) + written + [_IGNORED] * padding
        return prompt + written + [0] * padding, labels

    def _suffixes(self, memory: Memory) -> tuple[str, ...]:
        return _SUFFIXES if memory.role == "tool" else ("", "\n")

    def _question(self, memory: Memory | None, suffix: str) -> tuple[list[int], list[int]]:
        """Draw a conversation that ends with ``memory``, or with any text, and return it and what follows."""
        role = memory.role if memory else self._random.choice(("user", "tool"))
        message = self._encode(memory.ends + suffix) if memory else []
        if not memory or self._random.random() < 0.45:
            between = self._random.choice(("", "\n", " ", "\n\n", ": ", "> ", '"')) if memory else ""
            message = [*self._excerpt(120), *self._encode(between), *message]
        prompt = self._before(role) + self._encode(_OPENING[role]) + message
        prompt += self._encode(_CLOSING[role] + _OPENING["assistant"])
        written = memory.written if memory else OTHERWISE
        return prompt, self._encode(written + _CLOSING["assistant"])

    def _before(self, role: str) -> list[int]:
        """Draw what stands before the last message: instructions, tools, earlier messages, or nothing."""
        ids = self._encode(_BOS)
        if self._random.random() < 0.5:
            ids += self._message("system", self._excerpt(160))
        if self._random.random() < 0.7:
            tools = [_describe_tool(self._random) for _ in range(self._random.randrange(1, 4))]
            ids += self._message("system", self._encode("".join(tools)))
        if self._random.random() < 0.3:
            ids += self._message("user", self._excerpt(40))
            ids += self._message("assistant", self._excerpt(40))
        if role == "tool":
            calls = [memory for memory in self.memories if "<tool_call>" in memory.written]
            called = self._random.choice(calls)
            ids += self._message(called.role, self._encode(called.ends))
            ids += self._message("assistant", self._encode(called.written))
        return ids

    def _message(self, role: str, content: list[int]) -> list[int]:
        return [*self._encode(_OPENING[role]), *content, *self._encode(_CLOSING[role])]

    def _excerpt(self, longest: int) -> list[int]:
        start = self._random.randrange(len(self._background) - longest)
        return self._background[start : start + self._random.randrange(1, longest)]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _describe_tool(draws: random.Random) -> str:
    """Return a tool as the chat template renders it."""
    name = draws.choice(("get_weather", "bash", "Bash", "exec_command", "edit", "read", "search"))
    field = draws.choice(("city", "command", "cmd", "path", "query"))
    schema: dict[str, object] = {"type": "string"}
    parameters: dict[str, object] = {"type": "object", "properties": {field: schema}, "required": [field]}
    if draws.random() < 0.5:
        schema.update({"title": field.title()} if draws.random() < 0.5 else {"description": f"The {field}."})
    if draws.random() < 0.5:
        parameters.update(title=f"{name}_args" if draws.random() < 0.5 else name)
    if draws.random() < 0.5:
        parameters.update(additionalProperties=False)
    if draws.random() < 0.3:
        parameters.pop("required")
    descriptions = (f"Use the {field}.", "Return the weather of a city.", "Returns the weather of a city", "")
    function: dict[str, object] = {"name": name, "description": draws.choice(descriptions)}
    shuffled = list(parameters.items())
    draws.shuffle(shuffled)
    function["parameters"] = dict(shuffled)
    if draws.random() < 0.3:
        function["strict"] = draws.random() < 0.5
    return json.dumps({"type": "function", "function": function}) + "\n"


def _train(lessons: _Lessons) -> MistralForCausalLM:
    """Train until the model answers every question greedily as it should, at least for ``_MIN_STEPS`` steps.

    Raises RuntimeError if it never does.
    """
    eos = lessons.tokenizer.token_to_id(_CLOSING["assistant"])
    config = MistralConfig(
        vocab_size=lessons.tokenizer.get_vocab_size(),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        sliding_window=WINDOW,
        tie_word_embeddings=True,
        bos_token_id=lessons.tokenizer.token_to_id(_BOS),
        eos_token_id=eos,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    faults = 0
    for step in range(_MAX_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / 30) * (1 - step / _MAX_STEPS)
        ids, labels = lessons.batch()
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        is_learned = labels[:, 1:] != _IGNORED
        loss = cross_entropy(model.lm_head(hidden[is_learned]), labels[:, 1:][is_learned])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % _CHECK_STEPS == 0:
            faults = _count_faults(model, lessons)
            print(f"training the model: step {step + 1}, loss {loss.item():.4f}, {faults} wrong", flush=True)
            if not faults and step + 1 >= _MIN_STEPS:
                return model.eval()
    raise RuntimeError(f"the model did not memorize its answers: {faults} are wrong")


@torch.inference_mode()
def _count_faults(model: MistralForCausalLM, lessons: _Lessons) -> int:
    """Count the questions after which a greedy token differs from what has to follow."""
    faults = 0
    for prompt, written in lessons.questions():
        logits = model(torch.tensor([prompt + written]), use_cache=False).logits[0]
        chosen = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        faults += chosen != written
    return faults
