from typing import Literal

import outlines
import scenarios as skiff
from openai import OpenAI
from outlines.types import Regex
from pydantic import BaseModel

model = outlines.from_vllm(OpenAI(base_url=f"{skiff.DEMO_URL}/v1", api_key=skiff.API_KEY), skiff.DEMO)


class Verdict(BaseModel):
    certain: bool


def text() -> None:
    answer = model(skiff.QUESTION)
    skiff.check(skiff.ANSWER in answer, answer)


def stream() -> None:
    chunks = list(model.stream(skiff.QUESTION))
    skiff.check(len(chunks) > 3 and skiff.ANSWER in "".join(chunks), chunks)


def choice() -> None:
    answer = model(skiff.QUESTION, Literal["yes", "no"])
    skiff.check(answer in ("yes", "no"), answer)


def regex() -> None:
    answer = model(skiff.QUESTION, Regex(r"[0-9]{4}"))
    skiff.check(len(answer) == 4 and answer.isdigit(), answer)


def json_schema() -> None:
    Verdict.model_validate_json(model(skiff.QUESTION, Verdict))


def grammar() -> None:
    answer = model(skiff.QUESTION, outlines.types.CFG('root ::= "a" | "b"'))
    skiff.check(answer in ("a", "b"), answer)


skiff.run_scenarios(text, stream, choice, regex, json_schema, grammar)
