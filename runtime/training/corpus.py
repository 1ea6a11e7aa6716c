"""The facts, the ways to ask for them, and which questions are kept out of training.

Everything here is read from `data/`: one TOML table per fact in `data/facts/`, the templates that turn its phrases
into questions in `data/phrasing.toml`, off-topic questions in `data/offtopic.toml`. No torch, no tokenizer.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
EVALUATION = Path(__file__).parent / "evaluation"
OFF_TOPIC = "off-topic"
KINDS = ("is", "are", "do", "about")
FIELDS = {*KINDS, "ask", "answer", "more", "follow"}


@dataclass(frozen=True)
class Fact:
    """One answer and all questions that lead to it. `questions` are trained on, `held_out` never are."""

    id: str
    topic: str
    answer: str
    more: str | None
    follow: tuple[tuple[str, str], ...]
    asked: tuple[str, ...]
    questions: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def first_sentence(self) -> str:
        """The answer cut to one sentence; lists and small talk stay whole."""
        if "\n" in self.answer or self.topic == "smalltalk":
            return self.answer
        return re.split(r"(?<=[.!?:]) (?=[A-Z`])", self.answer)[0]


def normalized(question: str) -> str:
    """The question without case and punctuation, by which two questions count as the same."""
    return re.sub(r"[^\w+/*-]+", " ", question.lower()).strip()


def is_held_out(text: str, *, one_in: int) -> bool:
    """A fixed pseudo-random choice of one text in `one_in`, the same on every machine."""
    digest = hashlib.sha256(normalized(text).encode()).digest()
    return int.from_bytes(digest[:4], "big") % one_in == 0


@cache
def phrasing() -> dict[str, Any]:
    """The templates and small phrases of `data/phrasing.toml`."""
    return tomllib.loads((DATA / "phrasing.toml").read_text())


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def fill(template: str, phrase: str) -> str:
    """Puts a fact's phrase into a template: {x} as it is, {b} without its article, {X} and {B} capitalized."""
    bare = re.sub(r"^(a|an|the) ", "", phrase)
    slots = {"x": phrase, "X": capitalized(phrase), "b": bare, "B": capitalized(bare)}
    return template.format_map(slots)


def templated(table: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    """Every question that the templates make for a fact, and whether it uses the plainest template of its kind."""
    for kind in KINDS:
        for phrase in table.get(kind, ()):
            for index, template in enumerate(phrasing()[kind]):
                yield fill(template, phrase), index == 0


def build_fact(fact_id: str, topic: str, table: dict[str, Any]) -> Fact:
    """Expands a table into a fact. Hand-written and plainest questions are always trained on; of the rest one in ten is not."""
    unknown = set(table) - FIELDS
    if unknown or "answer" not in table:
        raise ValueError(f"fact {fact_id!r}: unknown fields {sorted(unknown)} or no answer")
    asked = (*table.get("ask", ()), *more_questions().get(fact_id, ()))
    trained = {normalized(text): text for text in asked}
    held_out: dict[str, str] = {}
    variants = list(templated(table))
    trained.update((normalized(text), text) for text, plainest in variants if plainest)
    for text, _ in variants:
        key = normalized(text)
        if key in trained or not is_held_out(text, one_in=10):
            trained.setdefault(key, text)
        else:
            held_out[key] = text
    follow = tuple((question, target) for question, target in table.get("follow", ()))
    answer, more = table["answer"].strip(), table.get("more")
    return Fact(
        fact_id,
        topic,
        answer,
        more.strip() if more else None,
        follow,
        asked,
        tuple(trained.values()),
        tuple(held_out.values()),
    )


@cache
def more_questions() -> dict[str, list[str]]:
    """Hand-written questions by fact, beside those in the facts' own tables."""
    return tomllib.loads((DATA / "more_questions.toml").read_text())


@cache
def facts() -> dict[str, Fact]:
    """All facts by id, in the order of the files' names."""
    found: dict[str, Fact] = {}
    for path in sorted((DATA / "facts").glob("*.toml")):
        for fact_id, table in tomllib.loads(path.read_text()).items():
            if fact_id in found:
                raise ValueError(
                    f"{path.name}: fact {fact_id!r} exists already in {found[fact_id].topic}.toml"
                )
            found[fact_id] = build_fact(fact_id, path.stem, table)
    if unknown := set(more_questions()) - set(found):
        raise ValueError(f"more_questions.toml: no such facts: {sorted(unknown)}")
    return found


@cache
def off_topic() -> dict[str, Any]:
    """The refusal, its question templates, and the words for their slots."""
    return tomllib.loads((DATA / "offtopic.toml").read_text())


@cache
def slot_words(slot: str, *, held_out: bool) -> list[str]:
    """The words of an off-topic slot: one in six is kept out of training."""
    return [word for word in off_topic()["slots"][slot] if is_held_out(word, one_in=6) == held_out]


def passages() -> list[str]:
    """Plain paragraphs for continuing a raw prompt."""
    return (DATA / "passages.txt").read_text().splitlines()


def written_questions(name: str) -> list[tuple[str, str]]:
    """The hand-written questions of `evaluation/<name>.toml` with the answer that each should get."""
    tables = tomllib.loads((EVALUATION / f"{name}.toml").read_text())
    refusal = off_topic()["answer"]
    return [
        (question, refusal if fact_id == OFF_TOPIC else facts()[fact_id].answer)
        for fact_id, questions in tables.items()
        for question in questions
    ]


@cache
def never_trained() -> frozenset[str]:
    """The normalized form of every held-out question, so that augmentation cannot leak one."""
    keys = {normalized(text) for fact in facts().values() for text in fact.held_out}
    for name in ("choose", "report"):
        keys.update(normalized(question) for question, _ in written_questions(name))
    return frozenset(keys)


def conflicts() -> list[str]:
    """Questions that lead to two different facts: there must be none."""
    owner: dict[str, str] = {}
    found = []
    for fact in facts().values():
        for question in (*fact.questions, *fact.held_out):
            first = owner.setdefault(normalized(question), fact.id)
            if first != fact.id:
                found.append(f"{question!r}: {first} and {fact.id}")
    return found
