"""Draws conversations in which tools are offered, called and answered, and writes them as the chat template does.

The names of tools, parameters, pods, namespaces and cities vary so much that the model has to copy them from the prompt.
Some questions need no tool, and some need a tool that is not offered.
"""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from augment import augmented
from conversations import Message, State, invented_word, next_turn
from corpus import DATA, OFF_TOPIC, capitalized, facts, is_held_out, off_topic, phrasing

Json = dict[str, Any]
TURNS = ((1, 1, 0.5), (2, 3, 0.35), (4, 6, 0.15))
TURN_KINDS = {"call": 0.62, "parallel": 0.08, "absent": 0.12, "plain": 0.18}
HELD_OUT_NAMES = 6
HELD_OUT_TEMPLATES = 8
FIRST_MARK = 0xE000
"""Characters of the private use area stand for the values of a question while its words are varied."""
NOISE = {
    "ip": "10.1.2.3",
    "age": "3d",
    "ready": True,
    "uid": "5b1f",
    "ok": True,
    "version": 2,
    "cached": False,
}


@dataclass(frozen=True)
class Tool:
    """A tool as one conversation offers it. `spelling` has the parameter's name for each slot of the questions."""

    kind: str
    name: str
    description: str
    spelling: dict[str, str]
    optional: tuple[str, ...] = ()

    def to_openai(self) -> Json:
        """The tool as a request has it."""
        types = {name: {"type": "string"} for name in (*self.spelling.values(), *self.optional)}
        if "replicas" in self.spelling:
            types[self.spelling["replicas"]] = {"type": "integer"}
        parameters = {"type": "object", "properties": types, "required": list(self.spelling.values())}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def arguments(self, values: Json) -> Json:
        return {name: values[slot] for slot, name in self.spelling.items()}


@dataclass(frozen=True)
class ToolQuestion:
    """A question, the calls that it needs, their results, and the answer that follows from these."""

    question: str
    calls: list[tuple[str, Json]]
    results: list[str]
    answer: str

    def turn(self) -> list[Message]:
        return [
            Message("user", self.question),
            Message("assistant", calls_text(self.calls)),
            Message("user", results_text(self.results)),
            Message("assistant", self.answer),
        ]


# The markup of the chat template.


def signature(tool: Json) -> str:
    """One line of the list of tools: `name(parameter, optional?, number: integer): description`."""
    function = tool["function"]
    schema = function.get("parameters") or {}
    required = schema.get("required") or ()
    parameters = []
    for name, member in (schema.get("properties") or {}).items():
        kind = member.get("type", "string")
        mark = "" if name in required else "?"
        parameters.append(f"{name}{mark}: {kind}" if kind != "string" else f"{name}{mark}")
    description = (function.get("description") or "").strip()
    line = f"{function['name']}({', '.join(parameters)})"
    return f"{line}: {description}" if description else line


def system_text(prompt: str, tools: list[Json]) -> str:
    """The system message: the prompt, if any, and the tools."""
    lines = [prompt] if prompt else []
    return "\n".join([*lines, "Tools:", *map(signature, tools)])


def calls_text(calls: list[tuple[str, Json]]) -> str:
    objects = (
        json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls
    )
    return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)


def results_text(results: list[str]) -> str:
    return "\n".join(f"<tool_response>{each}</tool_response>" for each in results)


# Values.


@cache
def data() -> Json:
    """The tables of `data/tools.toml`."""
    return tomllib.loads((DATA / "tools.toml").read_text())


def word(rng: random.Random) -> str:
    return rng.choice(data()["values"]["word"]) if rng.random() < 0.6 else invented_word(rng).lower()


def suffix(rng: random.Random) -> str:
    """The end of a pod's name as its controller makes it, or none."""
    letters = "bcdfghjklmnpqrstvwxz2456789"
    kind = rng.random()
    if kind < 0.3:
        return ""
    if kind < 0.65:
        return f"-{rng.randrange(12)}"
    tail = "".join(rng.choices(letters, k=5))
    head = "".join(rng.choices("0123456789abcdef", k=rng.randint(4, 10)))
    return f"-{tail}" if kind < 0.8 else f"-{head}" if kind < 0.9 else f"-{head}-{tail}"


def pod(rng: random.Random) -> str:
    return "-".join(word(rng) for _ in range(rng.choice((1, 1, 2)))) + suffix(rng)


def deployment(rng: random.Random) -> str:
    return "-".join(word(rng) for _ in range(rng.choice((1, 1, 2))))


def namespace(rng: random.Random) -> str:
    if rng.random() < 0.45:
        return str(rng.choice(data()["values"]["place"]))
    return word(rng) + (f"-{word(rng)}" if rng.random() < 0.25 else "")


def city(rng: random.Random) -> str:
    known = rng.choice(data()["values"]["city"])
    return str(known) if rng.random() < 0.7 else invented_word(rng).capitalize()


def identifier(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return str(rng.randrange(10 ** rng.randint(1, 6)))
    return pod(rng) if kind < 0.8 else f"{word(rng)[0].upper()}-{rng.randrange(1000)}"


NAMES: dict[str, Callable[[random.Random], str]] = {
    "pod": pod,
    "deployment": deployment,
    "namespace": namespace,
    "city": city,
    "value": identifier,
}


def name(slot: str, rng: random.Random, *, held_out: bool) -> str:
    """A value for a slot; with `held_out` one that training never shows in a question."""
    while True:
        value = NAMES[slot](rng)
        if is_held_out(value, one_in=HELD_OUT_NAMES) == held_out:
            return value


def values_for(tool: Tool, rng: random.Random, *, held_out: bool) -> Json:
    return {
        slot: rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 20, 25, 30, 50, 64, 100))
        if slot == "replicas"
        else name(slot, rng, held_out=held_out)
        for slot in tool.spelling
    }


def of_pool(pool: str, rng: random.Random, subject: str = "") -> str:
    """A value from one of the lists, with its own slots filled."""
    text: str = rng.choice(data()["values"][pool])
    text = re.sub("{number}", lambda _: str(rng.randrange(10 ** rng.randint(1, 4))), text)
    return re.sub("{word}", lambda _: word(rng), text).replace("{subject}", subject)


# Tools.


def described_tool(kind: str, rng: random.Random) -> Tool:
    table = data()["tools"][kind]
    spelling = {slot: rng.choice(names) for slot, names in table["parameters"].items()}
    if rng.random() < 0.15:
        spelling = dict(rng.sample(list(spelling.items()), len(spelling)))
    optional = rng.choice((("unit",), ("verbose",), ("limit",), ("cluster",))) if rng.random() < 0.12 else ()
    return Tool(kind, rng.choice(table["names"]), rng.choice(table["descriptions"]), spelling, optional)


def invented_tool(rng: random.Random) -> Tool:
    """A tool of some verb and some noun, with one parameter."""
    table = data()["invented"]
    verb, noun = rng.choice(table["verbs"]), rng.choice(table["nouns"])
    if rng.random() < 0.25:
        noun = invented_word(rng).lower()
    words = {"verb": verb, "Verb": capitalized(verb), "noun": noun}
    key = rng.choice(table["keys"]).format_map(words)
    description = rng.choice(table["descriptions"]).format_map(words)
    return Tool(f"{verb}|{noun}", f"{verb.replace(' ', '_')}_{noun}", description, {"value": key})


def offered(rng: random.Random) -> list[Tool]:
    """One to four tools of different names; the two of the guide's example are the likeliest."""
    kinds = list(data()["tools"])
    tools: dict[str, Tool] = {}
    if rng.random() < 0.25:
        tools = {kind: described_tool(kind, rng) for kind in ("get_pod_status", "list_pods")}
    count = max(len(tools), rng.choice((1, 1, 2, 2, 2, 3, 4)))
    while len(tools) < count:
        tool = invented_tool(rng) if rng.random() < 0.3 else described_tool(rng.choice(kinds), rng)
        if tool.name not in {each.name for each in tools.values()}:
            tools.setdefault(tool.kind, tool)
    return rng.sample(list(tools.values()), count)


# Questions.


def templates(kind: str, *, held_out: bool) -> list[str]:
    """A described tool's questions: one in eight is kept out of training, but never a tool's only ones."""
    asked: list[str] = data()["tools"][kind]["ask"]
    chosen = [text for text in asked if is_held_out(text, one_in=HELD_OUT_TEMPLATES) == held_out]
    return chosen or asked


def with_place(template: str, values: Json, rng: random.Random) -> str:
    """The template with a way to name the namespace; without one, the namespace is "default"."""
    if "{in}" not in template:
        return template
    if len(values) > 1 and rng.random() < 0.12:
        values["namespace"] = "default"
        return template.replace(" {in}", "")
    return template.replace("{in}", rng.choice(data()["in_namespace"]))


def worded(template: str, values: Json, rng: random.Random, *, vary: bool) -> str:
    """The question with its values. Its words are varied, its values are not: they have to be copied."""
    marks = {slot: chr(FIRST_MARK + index) for index, slot in enumerate(values)}
    text = template.format_map(marks)
    if vary:
        text = augmented(text, rng)
        if any(mark not in text for mark in marks.values() if mark in template.format_map(marks)):
            text = template.format_map(marks)
    for slot, mark in marks.items():
        text = text.replace(mark, str(values[slot]))
    return text


def question_for(tool: Tool, values: Json, rng: random.Random, *, held_out: bool) -> str:
    vary = not held_out
    if "|" in tool.kind:
        verb, _, noun = tool.kind.partition("|")
        template = rng.choice(data()["invented"]["ask"])
        for slot, text in (("verb", verb), ("Verb", capitalized(verb)), ("noun", noun)):
            template = template.replace("{" + slot + "}", text)
        template = template.replace("{tool}", tool.name).replace("{key}", tool.spelling["value"])
        # An invented noun and a tool's name have to be copied as well, so these words stay as they are.
        return worded(template, values, rng, vary=False)
    template = with_place(rng.choice(templates(tool.kind, held_out=held_out)), values, rng)
    return worded(template, values, rng, vary=vary)


# Results.


def written(value: Any, rng: random.Random) -> str:
    """JSON as clients write it: mostly with blanks after commas and colons, sometimes without."""
    return json.dumps(value) if rng.random() < 0.75 else json.dumps(value, separators=(",", ":"))


def listed(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


@dataclass
class ResultDraft:
    """The members of a result while it is drawn, and the sentences that they lead to."""

    members: Json = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)


def failed(values: Json, rng: random.Random) -> tuple[str, str]:
    slot = next(iter(reversed(values)))
    kind = "" if slot in ("value", "replicas") else f"{slot} "
    error = of_pool("error", rng, f"{kind}{values[slot]}")
    return written({"error": error}, rng), data()["failure"].format(error=error)


def invented_result(tool: Tool, rng: random.Random) -> tuple[str, str]:
    table = data()["invented"]
    keys = rng.sample(table["members"], rng.choice((1, 1, 2)))
    members = {key: rng.choice((word(rng), rng.randrange(1000), of_pool("phase", rng))) for key in keys}
    said = " and ".join(f"{key} {value}" for key, value in members.items())
    return written(members, rng), table["say"].format(tool=tool.name, members=said)


def result_value(slot: str, values: Json, rng: random.Random) -> Any:
    match slot:
        case "pods" | "services" | "deployments":
            make = pod if slot == "pods" else deployment
            return [make(rng) for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4, 5)))]
        case "temperature":
            return rng.randint(-20, 42)
        case "time":
            return f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        case "replicas":
            return values["replicas"]
    return of_pool(slot, rng)


def extra_value(slot: str, rng: random.Random) -> Any:
    match slot:
        case "restarts":
            return rng.choice((0, 0, 0, 1, 2, 3, 5, rng.randrange(200)))
        case "node":
            return (
                f"{rng.choice(('node', 'node', 'worker', 'gpu', 'ip-10-0', word(rng)))}-{rng.randrange(20)}"
            )
    return of_pool(slot, rng)


def result_of(tool: Tool, values: Json, rng: random.Random) -> tuple[str, str]:
    """The result of a call and the sentences that report it."""
    if rng.random() < 0.07:
        return failed(values, rng)
    if "|" in tool.kind:
        return invented_result(tool, rng)
    table = data()["tools"][tool.kind]
    found = {slot: result_value(slot, values, rng) for slot in table["result"]}
    items = next((value for value in found.values() if isinstance(value, list)), None)
    said = {
        slot: listed(value) if isinstance(value, list) and value else value for slot, value in found.items()
    }
    draft = ResultDraft()
    sentence = "say" if items is None or len(items) > 1 else "one" if items else "empty"
    draft.sentences.append(table[sentence].format_map({**values, **said}))
    if items is not None and rng.random() < 0.35:
        return written(items, rng), draft.sentences[0]
    if items is None and len(found) == 1 and rng.random() < 0.12:
        return str(next(iter(found.values()))), draft.sentences[0]
    if rng.random() < 0.4:
        draft.members.update(tool.arguments(values))
    draft.members.update((rng.choice(keys), found[slot]) for slot, keys in table["result"].items())
    for slot, extra in table.get("extra", {}).items():
        if rng.random() < 0.35:
            value = extra_value(slot, rng)
            draft.members[rng.choice(extra["keys"])] = value
            draft.sentences.append(extra["say"].format_map({slot: value}))
    if rng.random() < 0.15:
        key = rng.choice(list(NOISE))
        draft.members.setdefault(key, NOISE[key])
    members = list(draft.members.items())
    if rng.random() < 0.3:
        rng.shuffle(members)
    return written(dict(members), rng), " ".join(draft.sentences)


# Turns.


def single_call(tools: list[Tool], rng: random.Random, *, held_out: bool = False) -> ToolQuestion:
    tool = rng.choice(tools)
    values = values_for(tool, rng, held_out=held_out)
    question = question_for(tool, values, rng, held_out=held_out)
    result, answer = result_of(tool, values, rng)
    return ToolQuestion(question, [(tool.name, tool.arguments(values))], [result], answer)


def parallel_calls(tools: list[Tool], rng: random.Random, *, held_out: bool = False) -> ToolQuestion:
    """Two questions in one: of the same tool about two pods or cities, or of two tools."""
    first, second = rng.choice(tools), rng.choice(tools)
    both = [single_call([tool], rng, held_out=held_out) for tool in (first, second)]
    if first is second and first.kind == "get_pod_status":
        shared = name("namespace", rng, held_out=held_out)
        values = [{**values_for(first, rng, held_out=held_out), "namespace": shared} for _ in range(2)]
        results = [result_of(first, each, rng) for each in values]
        template = rng.choice(
            ("What is the status of the pods {0} and {1} {in}?", "Are {0} and {1} {in} running?")
        )
        place = rng.choice(data()["in_namespace"]).format(namespace=shared)
        question = template.replace("{in}", place).format(values[0]["pod"], values[1]["pod"])
        calls = [(first.name, first.arguments(each)) for each in values]
        return ToolQuestion(
            question, calls, [result for result, _ in results], " ".join(said for _, said in results)
        )
    link = rng.choice(data()["both"])
    rest = both[1].question
    question = f"{both[0].question.rstrip('?.! ')} {link} {rest[:1].lower() + rest[1:]}"
    return ToolQuestion(
        question,
        [call for each in both for call in each.calls],
        [result for each in both for result in each.results],
        " ".join(each.answer for each in both),
    )


def absent_call(tools: list[Tool], rng: random.Random, *, held_out: bool = False) -> tuple[str, str]:
    """A question that needs a tool which is not offered, and its answer without the tool."""
    kinds = [kind for kind in data()["tools"] if kind not in {tool.kind for tool in tools}]
    tool = described_tool(rng.choice(kinds), rng)
    question = question_for(tool, values_for(tool, rng, held_out=held_out), rng, held_out=held_out)
    without = data()["tools"][tool.kind]["without"]
    return question, off_topic()["answer"] if without == OFF_TOPIC else facts()[without].answer


def plain_turn(tools: list[Tool], state: State, rng: random.Random) -> tuple[str, str, State]:
    """An ordinary turn; an off-topic question that one of the tools answers is drawn again."""
    kinds = {tool.kind for tool in tools}
    while True:
        question, answer, after = next_turn(rng, state)
        if not ("get_weather" in kinds and re.search(r"weather in\b", question, re.IGNORECASE)):
            return question, answer, after


def tool_turns(tools: list[Tool], count: int, state: State, rng: random.Random) -> Iterator[Message]:
    """The turns of one conversation. Only its last answer can be repeated or explained."""
    for _ in range(count):
        kind = rng.choices(list(TURN_KINDS), list(TURN_KINDS.values()))[0]
        if kind in ("call", "parallel"):
            drawn = (single_call if kind == "call" else parallel_calls)(tools, rng)
            yield from drawn.turn()
            state = State(drawn.answer, brief=state.brief)
            continue
        if kind == "absent" and not state.brief:
            question, answer = absent_call(tools, rng)
            state = State(answer)
        else:
            question, answer, state = plain_turn(tools, state, rng)
        yield Message("user", question)
        yield Message("assistant", answer)


def tool_conversation(rng: random.Random) -> list[Message]:
    """A chat of 1 to 6 turns whose system message lists tools."""
    tools, state, prompt = offered(rng), State(), ""
    if rng.random() < 0.5:
        state = State(brief=rng.random() < 0.06)
        prompt = rng.choice(phrasing()["brief" if state.brief else "system"])
    low, high, _ = rng.choices(TURNS, [share for *_, share in TURNS])[0]
    system = Message("system", system_text(prompt, [tool.to_openai() for tool in tools]))
    return [system, *tool_turns(tools, rng.randint(low, high), state, rng)]
