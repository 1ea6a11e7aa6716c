import instructor
import scenarios as skiff
from openai import OpenAI
from pydantic import BaseModel

demo = OpenAI(base_url=f"{skiff.DEMO_URL}/v1", api_key=skiff.API_KEY)
tools = OpenAI(base_url=f"{skiff.TOOLS_URL}/v1", api_key=skiff.API_KEY)
MESSAGES = [{"role": "user", "content": skiff.QUESTION}]


class Verdict(BaseModel):
    """The verdict."""

    certain: bool
    stars: bool


def forced_tool() -> None:
    client = instructor.from_openai(tools, mode=instructor.Mode.TOOLS)
    answer = client.chat.completions.create(
        model=skiff.TOOLS, messages=MESSAGES, response_model=Verdict, max_retries=0
    )
    skiff.check(isinstance(answer, Verdict), answer)


def json_schema() -> None:
    client = instructor.from_openai(demo, mode=instructor.Mode.JSON_SCHEMA)
    answer = client.chat.completions.create(
        model=skiff.DEMO, messages=MESSAGES, response_model=Verdict, max_retries=0
    )
    skiff.check(isinstance(answer, Verdict), answer)


def stream() -> None:
    client = instructor.from_openai(tools, mode=instructor.Mode.TOOLS)
    partial = list(
        client.chat.completions.create_partial(
            model=skiff.TOOLS, messages=MESSAGES, response_model=Verdict, max_retries=0
        )
    )
    skiff.check(len(partial) > 1 and isinstance(partial[-1].certain, bool), partial)


skiff.run_scenarios(forced_tool, json_schema, stream)
