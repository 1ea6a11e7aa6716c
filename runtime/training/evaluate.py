"""Asks a trained demo model questions that training never showed, and counts the answers that match word for word.

Sets: `trained` (a sanity check), `template` (held-out variants of the templates), `choose` and `report` (written by hand;
configurations are chosen by the first, the second is only reported), `off-topic` (words never trained on), `late` (after
a long chat), and `sampled` (the template set at temperature 0.7). With tools offered: `tool-calls` (questions that need
one or two calls, with wordings and names that training never shows), `tool-answers` (the sentences after the results), and
`tool-plain` (questions that need none of the offered tools).
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from build_tokenizer import BOS, END, MODEL
from conversations import Message, conversation, off_topic_question
from corpus import facts, off_topic, phrasing, written_questions
from tokenizers import Tokenizer
from tool_use import (
    Tool,
    ToolQuestion,
    absent_call,
    calls_text,
    offered,
    parallel_calls,
    single_call,
    system_text,
)
from transformers import LlamaForCausalLM

from skiff_runtime.engine.cpu import avoid_trapping_amx

MAX_NEW_TOKENS = 200
BATCH = 64
SETS = ["trained", "template", "choose", "report", "off-topic", "late", "sampled"]
TOOL_SETS = ["tool-calls", "tool-answers", "tool-plain"]


@dataclass(frozen=True)
class Case:
    """A chat that ends with a user's question, and the answer it should get."""

    messages: tuple[Message, ...]
    expected: str


def asked(question: str, expected: str) -> Case:
    return Case((Message("user", question),), expected)


def template_cases(count: int, *, trained: bool) -> list[Case]:
    rng = random.Random(1)
    pool = [
        (question, fact.answer)
        for fact in facts().values()
        for question in (fact.questions if trained else fact.held_out)
    ]
    return [asked(*pair) for pair in rng.sample(pool, count)]


def off_topic_cases(count: int) -> list[Case]:
    rng = random.Random(2)
    return [
        asked(off_topic_question(rng, kinds=("questions", "borrowed"), held_out=True), off_topic()["answer"])
        for _ in range(count)
    ]


def late_cases(count: int) -> list[Case]:
    """Held-out questions at the end of chats of 8 to 24 earlier turns, whose system prompt did not ask for brevity."""
    rng = random.Random(3)
    cases = []
    for case in template_cases(count, trained=False):
        history: list[Message] = []
        while len(history) < 16 or history[0].content in phrasing()["brief"]:
            history = conversation(rng)
        cases.append(Case((*history, *case.messages), case.expected))
    return cases


def offering(tools: list[Tool], *messages: Message) -> tuple[Message, ...]:
    """A chat whose system message lists the tools."""
    return (Message("system", system_text("", [tool.to_openai() for tool in tools])), *messages)


def tool_questions(count: int) -> list[tuple[list[Tool], ToolQuestion]]:
    """Questions with words and names that training never shows: nine in ten need one call, the others two."""
    rng = random.Random(4)
    return [
        (tools, (single_call if index % 10 else parallel_calls)(tools, rng, held_out=True))
        for index, tools in enumerate(offered(rng) for _ in range(count))
    ]


def tool_call_cases(count: int) -> list[Case]:
    return [
        Case(offering(tools, *drawn.turn()[:1]), calls_text(drawn.calls))
        for tools, drawn in tool_questions(count)
    ]


def tool_answer_cases(count: int) -> list[Case]:
    return [Case(offering(tools, *drawn.turn()[:3]), drawn.answer) for tools, drawn in tool_questions(count)]


def tool_plain_cases(count: int) -> list[Case]:
    """Held-out questions that need no tool, and for every fourth a question that needs one that is not offered."""
    rng = random.Random(5)
    cases = []
    for index, case in enumerate(template_cases(count, trained=False)):
        tools = offered(rng)
        if index % 4 == 0:
            case = asked(*absent_call(tools, rng, held_out=True))
        cases.append(Case(offering(tools, *case.messages), case.expected))
    return cases


def rendered(case: Case) -> str:
    """The prompt as the chat template renders it (a test compares the two)."""
    turns = "".join(f"<|{message.role}|>{message.content}{END}" for message in case.messages)
    return f"{BOS}{turns}<|assistant|>"


class Speaker:
    """A model with its tokenizer that answers batches of prompts."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()

    def generate(self, prompts: list[str], *, temperature: float = 0.0) -> list[str]:
        """The answers; one that did not end within the limit of tokens carries a mark at its end."""
        pad = int(self.model.config.pad_token_id)
        encoded = [self.ids(prompt) for prompt in prompts]
        width = max(map(len, encoded))
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=self.model.device)
        mask = torch.tensor(
            [[0] * (width - len(row)) + [1] * len(row) for row in encoded], device=self.model.device
        )
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        with torch.inference_mode():
            output = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=MAX_NEW_TOKENS,
                pad_token_id=pad,
                **sampling,
            )
        return [self.text(row[width:].tolist()) for row in output]

    def agrees(self, cases: list[Case]) -> list[bool]:
        """Return whether greedy decoding would give each expected answer, by one forward pass instead of many.

        It does exactly where the likeliest token after every beginning of the answer is the answer's next one.
        """
        prompts = [self.ids(rendered(case)) for case in cases]
        answers = [self.ids(case.expected + END) for case in cases]
        width = max(len(prompt) + len(rest) for prompt, rest in zip(prompts, answers, strict=True))
        rows = [(prompt + rest + [0] * width)[:width] for prompt, rest in zip(prompts, answers, strict=True)]
        with torch.inference_mode():
            likeliest = (
                self.model(input_ids=torch.tensor(rows, device=self.model.device)).logits.argmax(-1).tolist()
            )
        return [
            row[len(prompt) - 1 : len(prompt) + len(rest) - 1] == rest
            for row, prompt, rest in zip(likeliest, prompts, answers, strict=True)
        ]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, ids: list[int]) -> str:
        stops = set(self.model.config.eos_token_id)
        end = next((index for index, token in enumerate(ids) if token in stops), None)
        return str(self.tokenizer.decode(ids[:end])) + ("" if end is not None else " [cut off]")

    def answers(self, cases: list[Case], *, temperature: float = 0.0) -> list[str]:
        found: list[str] = []
        for start in range(0, len(cases), BATCH):
            prompts = [rendered(case) for case in cases[start : start + BATCH]]
            found += self.generate(prompts, temperature=temperature)
        return found


def is_whole_call(answer: str) -> bool:
    """True if the answer is one or more calls and nothing else, each with a name and an object of arguments."""
    calls = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", answer, re.DOTALL)
    if calls is None:
        return False
    try:
        objects = [json.loads(text) for text in calls[1].split("\n</tool_call>\n<tool_call>\n")]
    except ValueError:
        return False
    return all(
        isinstance(each, dict)
        and list(each) == ["name", "arguments"]
        and isinstance(each["name"], str)
        and isinstance(each["arguments"], dict)
        for each in objects
    )


def whole_answers(name: str) -> Callable[[str], bool]:
    """The predicate of an unbroken answer: a call, a sentence about a result, or some answer of the corpus."""
    if name == "tool-calls":
        return is_whole_call
    if name == "tool-answers":
        return lambda answer: answer.endswith(".") and "<" not in answer
    known = {text for fact in facts().values() for text in (fact.answer, fact.more, fact.first_sentence)}
    known.add(off_topic()["answer"])
    return known.__contains__


def report(name: str, cases: list[Case], answers: list[str], *, show: int) -> dict[str, float]:
    """Prints the share of exact answers and of whole ones, and a few misses."""
    misses = [(case, answer) for case, answer in zip(cases, answers, strict=True) if case.expected != answer]
    exact = 1 - len(misses) / len(cases)
    unbroken = sum(map(whole_answers(name), answers)) / len(cases)
    print(f"{name:12} {len(cases):4} questions   exact {exact:6.1%}   whole {unbroken:6.1%}", flush=True)
    for case, answer in misses[:show]:
        print(f"    ? {case.messages[-1].content}\n    > {answer[:160]!r}\n    = {case.expected[:160]!r}")
    return {"questions": len(cases), "exact": round(exact, 4), "whole": round(unbroken, 4)}


def evaluate(speaker: Speaker, names: list[str], *, count: int, show: int) -> dict[str, dict[str, float]]:
    makers: dict[str, Callable[[], list[Case]]] = {
        "trained": lambda: template_cases(count, trained=True),
        "template": lambda: template_cases(count, trained=False),
        "choose": lambda: [asked(*pair) for pair in written_questions("choose")],
        "report": lambda: [asked(*pair) for pair in written_questions("report")],
        "off-topic": lambda: off_topic_cases(count // 2),
        "late": lambda: late_cases(count // 4),
        "sampled": lambda: template_cases(count, trained=False),
        "tool-calls": lambda: tool_call_cases(count),
        "tool-answers": lambda: tool_answer_cases(count),
        "tool-plain": lambda: tool_plain_cases(count // 2),
    }
    results = {}
    for name in names:
        cases = makers[name]()
        answers = speaker.answers(cases, temperature=0.7 if name == "sampled" else 0.0)
        results[name] = report(name, cases, answers, show=show)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="model folder (default: the shipped one)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=[*SETS, *TOOL_SETS],
        default=[*SETS, *TOOL_SETS],
        help="which sets to ask (default: all)",
    )
    parser.add_argument("--count", type=int, default=400, help="questions in the largest sets (default: 400)")
    parser.add_argument("--show", type=int, default=5, help="misses to print per set (default: 5)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device == "cpu":
        avoid_trapping_amx()
    speaker = Speaker(options.model, options.device, getattr(torch, options.dtype))
    results = evaluate(speaker, options.sets, count=options.count, show=options.show)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
