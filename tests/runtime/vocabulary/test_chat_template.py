"""Chat templates render as in transformers, and an error in one ends a single request with a clear message."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import ChatPrompt
from skiff_runtime.vocabulary import chat_template
from skiff_runtime.vocabulary.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": ' Grüße, 東京 🙂\n"quoted" '},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And now?"},
]
TEMPLATES = {
    "turns": """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- '<<' + message['content'] + '>>' }}
    {%- else %}
        {{- '[' ~ message.role ~ '] ' ~ message.content | trim ~ eos_token }}
    {%- endif %}
{%- endfor %}
{% if add_generation_prompt %}
[assistant]
{% endif %}
""",
    "namespace, macro and loop controls": """{% set ns = namespace(count=0) -%}
{% macro turn(m) %}{{ loop_free }}{{ m.role }}={{ m.content }}{% endmacro %}
{% for m in messages %}
  {% if m.role == 'system' %}{% continue %}{% endif %}
  {% set ns.count = ns.count + 1 %}
  {{ ns.count }}:{{ turn(m) }}{{ ", " if not loop.last }}
  {% if ns.count == 2 %}{% break %}{% endif %}
{% endfor %}
""",
    "json": "{{ messages | tojson }} {{ messages[1] | tojson(indent=2) }} {{ messages[0] | tojson(sort_keys=true) }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "nothing defined": "{{ nothing }}{% if tools %}tools{% endif %}{{ documents is none }}{{ pad_token is defined }}",
    "date": "{{ strftime_now('%Y') }}{{ messages[-1]['content'][::-1] }}{{ '=' * 5 }}{{ 2 ** 10 }}",
}


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str, generation_prompt: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], TOKENS).render(
        ChatPrompt(CHAT, add_generation_prompt=generation_prompt)
    )
    theirs, _ = render_jinja_template(
        conversations=[CHAT],
        chat_template=TEMPLATES[name],
        add_generation_prompt=generation_prompt,
        **TOKENS,
    )
    assert ours == theirs[0]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[7]['role'] }}", "has no element 7|list object has no"),
        ("{{ messages + 1 }}", "can only concatenate list"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for m in messages %}", "malformed: line 1"),
        ("{{ messages | no_such_filter }}", "malformed: line 1: No filter named 'no_such_filter'"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 'a' * 10 ** 9 }}", "repetition in the template is too long"),
        ("{{ 9 ** 9999 }}", "power in the template is too large"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{% for i in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}", "wrote more than"),
    ],
)
def test_error_of_a_template_is_in_the_message(source: str, says: str) -> None:
    template = ChatTemplate(source, TOKENS)
    with pytest.raises(InvalidRequest, match=says) as caught:
        template.render(ChatPrompt(CHAT))
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        400,
        "messages",
        "chat_template_error",
    )
    assert len(caught.value.message) < 700


def test_hints_reach_only_a_template_that_reads_them() -> None:
    prompt = ChatPrompt([], template_options={"b": 2}, template_hints={"a": 1, "b": 1, "c": 1})
    source = "{% if a is defined %}a={{ a }}{% endif %}{% if b %}b={{ b }}{% endif %}{{ c_is }}"
    assert ChatTemplate(source, {}).render(prompt) == "a=1b=2"


@pytest.mark.parametrize(
    ("source", "shows"),
    [
        ("{{ messages }}", False),
        ("{# tools #}my tools: {{ 'tools' }}", False),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True),
        ("{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ tools }}", True),
        ("{% macro show(items) %}{{ items }}{% endmacro %}{{ show(tools) }}", True),
    ],
)
def test_tools_are_refused_by_a_template_that_does_not_read_them(source: str, shows: bool) -> None:
    template = ChatTemplate(source, {})
    assert template.shows_tools == shows
    prompt = ChatPrompt([], tools=[{"type": "function"}])
    if shows:
        template.render(prompt)
    else:
        with pytest.raises(InvalidRequest, match="does not show tools") as caught:
            template.render(prompt)
        assert caught.value.param == "tools"
    template.render(ChatPrompt([]))


def test_endless_template_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_TIMEOUT_SECONDS", 0.2)
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(InvalidRequest, match="ran for more than"):
        ChatTemplate(loop, TOKENS).render(ChatPrompt(CHAT))


def test_model_without_template_is_refused() -> None:
    template = ChatTemplate(None, TOKENS)
    assert not template.is_usable
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        template.render(ChatPrompt(CHAT))


def test_variables_of_one_render_are_not_visible_in_the_next() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ seen }}", TOKENS
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    assert [template.render(ChatPrompt(messages)) for _ in range(3)] == ["1"] * 3


TOOL = {
    "type": "function",
    "function": {"name": "now", "description": "The <time>.", "parameters": {"type": "object"}},
}
CALLING = """{% for t in tools %}{{ t | tojson }};{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.function.arguments.zone }}>
{%- endfor %}{{ m.tool_call_id }}{% endfor %}{% if enable_thinking is false %}<think></think>{% endif %}"""


def test_tools_and_options_reach_the_template_as_in_transformers() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": {"zone": "Köln"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "1"},
    ]
    prompt = ChatPrompt(messages, tools=[TOOL], template_options={"enable_thinking": False})
    theirs, _ = render_jinja_template([messages], tools=[TOOL], chat_template=CALLING, enable_thinking=False)
    assert ChatTemplate(CALLING, {}).render(prompt) == theirs[0]


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "documents"])
def test_options_cannot_override_the_variables_of_the_request(name: str) -> None:
    prompt = ChatPrompt(CHAT, template_options={name: "mine"})
    with pytest.raises(InvalidRequest, match=f"'{name}' is no option") as caught:
        ChatTemplate(TEMPLATES["turns"], TOKENS).render(prompt)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize("content", ["Once upon", " Once upon a \n ", "Hello.", "[a] {{ b }}"])
@pytest.mark.parametrize("trims", [False, True])
def test_final_message_is_continued_as_in_transformers(content: str, trims: bool) -> None:
    source = (
        TEMPLATES["turns"]
        if trims
        else "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    )
    messages: list[dict[str, Any]] = [*CHAT, {"role": "assistant", "content": content}]
    theirs, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, **TOKENS)
    prompt = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert ChatTemplate(source, TOKENS).render(prompt) == theirs[0]


@pytest.mark.parametrize(
    ("source", "content", "says"),
    [
        ("{{ messages[0].content }}", "Hello", "does not write the final message"),
        ("{{ messages[-1].content }}", " ", "needs a final message with content"),
    ],
)
def test_final_message_that_cannot_be_continued_is_refused(source: str, content: str, says: str) -> None:
    messages = [*CHAT, {"role": "assistant", "content": content}]
    with pytest.raises(InvalidRequest, match=says) as caught:
        ChatTemplate(source, TOKENS).render(ChatPrompt(messages, continue_final_message=True))
    assert caught.value.param == "continue_final_message"
