"""Chat templates render as transformers renders them; what they do wrong ends one request with a clear error."""

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.tokenizer import template as template_module
from skiff_runtime.tokenizer.template import ChatTemplate

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
    ours = ChatTemplate(TEMPLATES[name], TOKENS).render(CHAT, add_generation_prompt=generation_prompt)
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
def test_a_faulty_template_is_quoted(source: str, says: str) -> None:
    template = ChatTemplate(source, TOKENS)
    with pytest.raises(InvalidRequest, match=says) as caught:
        template.render(CHAT)
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        400,
        "messages",
        "chat_template_error",
    )
    assert len(caught.value.message) < 700


def test_an_endless_template_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "RENDER_TIMEOUT_SECONDS", 0.2)
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(InvalidRequest, match="ran for more than"):
        ChatTemplate(loop, TOKENS).render(CHAT)


def test_a_model_without_template() -> None:
    template = ChatTemplate(None, TOKENS)
    assert not template.usable
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        template.render(CHAT)


def test_renders_leave_nothing_behind() -> None:
    """One conversation's variables are never seen by the next."""
    template = ChatTemplate(
        "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ seen }}", TOKENS
    )
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
    assert [template.render(messages) for _ in range(3)] == ["1"] * 3
