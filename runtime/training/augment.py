"""Varies questions: other words, other frames, typing errors, so that the model understands how people really ask."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from corpus import never_trained, normalized, phrasing

Step = Callable[[str, random.Random], str]


def replaced(text: str, place: re.Match[str], word: str) -> str:
    return text[: place.start()] + word + text[place.end() :]


def with_synonym(text: str, rng: random.Random) -> str:
    """Replaces one word that has a synonym."""
    synonyms: dict[str, list[str]] = phrasing()["synonyms"]
    places = [match for match in re.finditer(r"[A-Za-z]+", text) if match.group() in synonyms]
    if not places:
        return text
    place = rng.choice(places)
    return replaced(text, place, rng.choice(synonyms[place.group()]))


def with_determiner(text: str, rng: random.Random) -> str:
    """Replaces one article: "a pod" may become "my pod"."""
    places = list(re.finditer(r"\b(a|an|the|my)\b", text))
    return replaced(text, rng.choice(places), rng.choice(phrasing()["determiners"])) if places else text


def with_number(text: str, rng: random.Random) -> str:
    """Replaces one number of replicas and the like by another."""
    places = list(re.finditer(r"\b(two|three|four|five|ten)\b", text))
    return replaced(text, rng.choice(places), rng.choice(phrasing()["numbers"])) if places else text


def with_filler(text: str, rng: random.Random) -> str:
    """Puts one word without weight between two others."""
    words = text.split(" ")
    words.insert(rng.randint(1, len(words)), rng.choice(phrasing()["fillers"]))
    return " ".join(words)


def with_typo(text: str, rng: random.Random) -> str:
    """Swaps, drops or doubles one letter inside a word of four letters or more."""
    words = list(re.finditer(r"[A-Za-z]{4,}", text))
    if not words:
        return text
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    pair = text[at : at + 2]
    damaged = rng.choice((pair[::-1], pair[0], pair[0] + pair))
    return text[:at] + damaged + text[at + 2 :]


def without_word(text: str, rng: random.Random) -> str:
    """Drops one short word of a longer question, as hurried people do."""
    words = text.split(" ")
    short = [index for index, word in enumerate(words) if len(word) <= 3 and word.isalpha()]
    if len(words) < 5 or not short:
        return text
    del words[rng.choice(short)]
    return " ".join(words)


def keywords(text: str, rng: random.Random) -> str:
    """Only the longer words, as in a search box."""
    kept = [word for word in text.rstrip("?.!").split(" ") if len(word) > 4 or not word.islower()]
    return " ".join(kept) if len(kept) >= 3 else text


def attached(text: str, frames: list[str], rng: random.Random) -> str:
    """Adds a frame before the question (it ends with a space) or after it (it begins with one)."""
    frame = rng.choice(frames)
    if not frame.startswith(" "):
        flows_on = frame.endswith((", ", ": ")) and rng.random() < 0.8
        return frame + (text[0].lower() + text[1:] if flows_on else text)
    return text + frame if frame.endswith((".", "!", "?")) else text.rstrip("?.!") + frame + "?"


def framed(text: str, rng: random.Random) -> str:
    """Puts a greeting, a word of thanks or another frame around the question."""
    return attached(text, phrasing()["before"] if rng.random() < 0.6 else phrasing()["after"], rng)


def in_other_case(text: str, rng: random.Random) -> str:
    """Mostly lower case, seldom shouting."""
    return text.upper() if rng.random() < 0.1 else text.lower()


def without_end(text: str, rng: random.Random) -> str:
    """The question without its punctuation mark, or with too much of it."""
    bare = text.rstrip("?.!")
    return bare + rng.choice(("", "", "", "", " ?", "??", "!", "."))


STEPS: tuple[tuple[Step, float], ...] = (
    (with_number, 0.7),
    (with_synonym, 0.3),
    (with_determiner, 0.2),
    (without_word, 0.1),
    (with_filler, 0.12),
    (keywords, 0.03),
    (framed, 0.25),
    (with_typo, 0.12),
    (in_other_case, 0.25),
    (without_end, 0.25),
)


def in_context(text: str, topic: str, rng: random.Random) -> str:
    """Names the subject, which the question itself may leave open: "... in Kubernetes?"."""
    subject = "skiff" if topic.startswith("skiff") else "kubernetes" if topic.startswith("kube") else None
    if subject is None or subject in text.lower():
        return text
    return attached(text, phrasing()["context"][subject], rng)


def augmented(question: str, rng: random.Random, *, topic: str = "") -> str:
    """The question with some of the steps applied; the question itself where the result is a held-out one."""
    text = in_context(question, topic, rng) if rng.random() < 0.15 else question
    for step, probability in STEPS:
        if rng.random() < probability:
            text = step(text, rng)
    return question if normalized(text) in never_trained() else text
