"""Draws conversations and plain texts from the corpus, with a seeded generator: the same seed gives the same text."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

from augment import augmented
from corpus import Fact, capitalized, facts, off_topic, passages, phrasing, slot_words

GOLDEN = ("deploy-model", "skiff", "kubernetes", "pod", "hello", "who-are-you", "get-started")
TURNS = ((1, 1, 0.45), (2, 3, 0.25), (4, 8, 0.2), (9, 24, 0.1))
OFF_TOPIC_KINDS = {"questions": 0.4, "borrowed": 0.15, "invented": 0.25, "plain": 0.2}
ONSETS = (*"bcdfghklmnprstvwz", "br", "cl", "dr", "fl", "gr", "pl", "qu", "sh", "sp", "str", "th", "tr")
SUFFIXES = ("tion", "ing", "er", "ism", "ist", "logy", "ment", "ia", "us", "ck", "ball")
ENDINGS = (*[""] * 8, *"nrstlmyx", *SUFFIXES)


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class State:
    """Context for the next turn: the last answer, and the fact that it came from, if any."""

    answer: str | None = None
    fact: Fact | None = None
    elaborated: bool = False
    brief: bool = False


@cache
def weighted_facts() -> tuple[list[Fact], list[float]]:
    """All facts, and how often each is drawn: the golden ones three times as often."""
    return list(facts().values()), [3.0 if fact_id in GOLDEN else 1.0 for fact_id in facts()]


def invented_word(rng: random.Random) -> str:
    """A word that means nothing, in lower case or capitalized."""
    syllables = [rng.choice(ONSETS) + rng.choice("aeiou") for _ in range(rng.randint(1, 4))]
    word: str = "".join(syllables) + rng.choice(ENDINGS)
    return word.capitalize() if rng.random() < 0.35 else word


def with_words(question: str, slot: str, words: list[str], rng: random.Random) -> str:
    """The question with a word of its own in each place of a slot."""
    return re.sub("{" + slot + "}", lambda _: rng.choice(words), question)


def off_topic_question(
    rng: random.Random, *, kinds: tuple[str, ...] = tuple(OFF_TOPIC_KINDS), held_out: bool = False
) -> str:
    """A question outside the subject; with `held_out`, its slot words are ones that training never shows."""
    kind = rng.choices(kinds, [OFF_TOPIC_KINDS[each] for each in kinds])[0]
    question: str = rng.choice(off_topic()[kind])
    for slot in off_topic()["slots"]:
        question = with_words(question, slot, slot_words(slot, held_out=held_out and slot != "verb"), rng)
    return capitalized(re.sub("{w}", lambda _: invented_word(rng), question))


def fact_question(fact: Fact, rng: random.Random) -> str:
    """One of the fact's questions; the hand-written ones have a share of their own."""
    if fact.asked and rng.random() < 0.35:
        return rng.choice(fact.asked)
    return rng.choice(fact.questions)


def answer_of(fact: Fact, state: State) -> str:
    return fact.first_sentence if state.brief else fact.answer


def fact_turn(rng: random.Random, state: State) -> tuple[str, str, State]:
    fact = rng.choices(*weighted_facts())[0]
    answer = answer_of(fact, state)
    return (
        augmented(fact_question(fact, rng), rng, topic=fact.topic),
        answer,
        State(answer, fact, brief=state.brief),
    )


def off_topic_turn(rng: random.Random, state: State) -> tuple[str, str, State]:
    answer = str(off_topic()["answer"])
    return augmented(off_topic_question(rng), rng), answer, State(answer, brief=state.brief)


def more_turn(rng: random.Random, state: State) -> tuple[str, str, State]:
    """Tell me more: the fact's second answer once, then a word that this is all."""
    question = augmented(rng.choice(phrasing()["more"]), rng)
    if state.fact is None:
        answer = str(off_topic()["answer"]) if state.answer else facts()["what-can-you-do"].answer
        return question, answer, State(answer, brief=state.brief)
    fresh = state.fact.more is not None and not state.elaborated
    answer = str(state.fact.more) if fresh else str(phrasing()["no_more"])
    return question, answer, State(answer, state.fact, elaborated=True, brief=state.brief)


def again_turn(rng: random.Random, state: State) -> tuple[str, str, State]:
    question = augmented(rng.choice(phrasing()["again"]), rng)
    answer = state.answer or facts()["what-can-you-do"].answer
    return question, answer, State(answer, state.fact, elaborated=state.elaborated, brief=state.brief)


def follow_turn(rng: random.Random, state: State) -> tuple[str, str, State]:
    """A question with a pronoun that points at the last fact; an ordinary one where the fact has none."""
    if state.fact is None or not state.fact.follow:
        return fact_turn(rng, state)
    question, target = rng.choice(state.fact.follow)
    answer = answer_of(facts()[target], state)
    return augmented(question, rng), answer, State(answer, facts()[target], brief=state.brief)


def next_turn(rng: random.Random, state: State) -> tuple[str, str, State]:
    if state.answer is not None and state.fact and state.fact.follow and rng.random() < 0.3:
        return follow_turn(rng, state)
    has_more = state.fact is not None and state.fact.more is not None and not state.elaborated
    kinds = (fact_turn, off_topic_turn, more_turn, again_turn)
    late = (0.6, 0.15, 0.2 if has_more else 0.06, 0.05)
    weights = late if state.answer is not None else (0.79, 0.2, 0.005, 0.005)
    return rng.choices(kinds, weights)[0](rng, state)


def conversation(rng: random.Random) -> list[Message]:
    """A chat of 1 to 24 turns, half of them with a system prompt."""
    low, high, _ = rng.choices(TURNS, [share for *_, share in TURNS])[0]
    messages, state = [], State()
    if rng.random() < 0.5:
        state = State(brief=rng.random() < 0.12)
        messages.append(Message("system", rng.choice(phrasing()["brief" if state.brief else "system"])))
    for _ in range(rng.randint(low, high)):
        question, answer, state = next_turn(rng, state)
        messages += [Message("user", question), Message("assistant", answer)]
    return messages


@cache
def told_facts() -> list[Fact]:
    """Facts whose answers read well as plain text."""
    return [
        fact for fact in facts().values() if fact.topic != "smalltalk" and not fact.answer.startswith("Run ")
    ]


def plain_text(rng: random.Random) -> str:
    """A text for continuing a raw prompt: a passage, an answer, or a question with its answer on the next line."""
    kind = rng.random()
    if kind < 0.35:
        return rng.choice(passages())
    if kind < 0.7:
        fact = rng.choice(told_facts())
        return f"{fact.answer} {fact.more}" if fact.more and rng.random() < 0.5 else fact.answer
    fact = rng.choices(*weighted_facts())[0]
    return f"{augmented(fact_question(fact, rng), rng)}\n{fact.answer}"
