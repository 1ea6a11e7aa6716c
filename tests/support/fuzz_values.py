"""Invalid and extreme values as JSON texts, by kind."""

import json
import random
from collections.abc import Callable
from typing import Final

BIG_BYTES: Final = 10 << 20
MANY: Final = 100_000
_BIG: Final = "a" * BIG_BYTES
_BIG_TEXTS: Final = (f'"{_BIG}"', " " * BIG_BYTES + "1", f'"{_BIG[: 7 << 20]}"')
_MANY_TEXTS: Final = (
    "[" + ",".join(f'"s{number}"' for number in range(MANY)) + "]",
    "[" + ",".join(["1"] * (3 * MANY)) + "]",
    "[" + ",".join(["{}"] * MANY) + "]",
    "{" + ",".join(f'"k{number}":{number}' for number in range(MANY)) + "}",
    "[" + "," * MANY + "]",
)
_FIELDS: Final = [
    "model",
    "input",
    "instructions",
    "include",
    "max_output_tokens",
    "previous_response_id",
    "reasoning",
    "prompt",
    "messages",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "n",
    "stream",
    "stream_options",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "echo",
    "best_of",
    "user",
    "priority",
    "response_format",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "text",
    "token_ids",
    "prompt_logprobs",
    "suffix",
    "add_generation_prompt",
    "continue_final_message",
    "parallel_tool_calls",
    "reasoning_effort",
    "metadata",
    "store",
    "system",
    "thinking",
    "stop_sequences",
    "output_config",
    "context_management",
    "cache_control",
    "mcp_servers",
]
Maker = Callable[[random.Random], str]


def any_field(draw: random.Random) -> str:
    """Draw the name of a field of some endpoint."""
    return draw.choice(_FIELDS)


def number(draw: random.Random) -> str:
    """Draw a number that is huge, tiny, not finite, or not JSON."""
    return draw.choice(
        (
            "NaN",
            "Infinity",
            "-Infinity",
            "1e400",
            "-1e400",
            "1e-400",
            "1e308",
            "-0",
            "-0.0",
            "9" * 5000,
            "-" + "9" * 400,
            str(1 << 31),
            str(1 << 63),
            str(-(1 << 63) - 1),
            "0.1" + "0" * 4000 + "1",
            "01",
            "+1",
            "1.",
            ".5",
            "0x10",
            "1e",
        )
    )


def text(draw: random.Random) -> str:
    """Draw a string with lone surrogates, control characters or bidirectional marks, or without an end."""
    return draw.choice(
        (
            '"\\ud800"',
            '"\\udfff\\ud800"',
            '"x\\ud83dy"',
            '"\\u0000"',
            '"' + "\\u0000" * 2000 + '"',
            '"\u202e\u2066\ufeff\uffff"',
            '"\x00"',
            '"\n"',
            '"\\x41"',
            '"\\u12"',
            '"abc',
            '"' + "\\" * 4001,
            json.dumps("🙂" * 3000),
            json.dumps("e\u0301" * 3000),
            json.dumps("<|end|><|bos|><|assistant|>" * 50),
            json.dumps("{{ ''.__class__.__mro__ }}{% for a in range(9999999) %}"),
        )
    )


def nested(draw: random.Random) -> str:
    """Draw deeply nested arrays and objects, closed or not."""
    depth = draw.choice((50, 300, 3000, 20_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]"), ('{"anyOf":[', "]}")))
    return opening * depth + "1" + (closing * depth if draw.random() < 0.7 else "")


def many(draw: random.Random) -> str:
    """Draw an array or object with a hundred thousand members."""
    return draw.choice(_MANY_TEXTS)


def big(draw: random.Random) -> str:
    """Draw ten megabytes, in one string or in white space."""
    return draw.choice(_BIG_TEXTS)


def wrong(draw: random.Random) -> str:
    """Draw plain JSON of any type."""
    return draw.choice(
        (
            "null",
            "true",
            "false",
            "0",
            "-1",
            "1",
            "1.5",
            '""',
            '"x"',
            "[]",
            "{}",
            "[null]",
            "[[]]",
            '{"a": null}',
            '[1, "x"]',
            '["x", 1]',
            "[[1], [2.5]]",
            '{"type": "json_schema"}',
        )
    )


def any_value(draw: random.Random) -> str:
    """Draw a value of any kind that is cheap to send."""
    return draw.choice((wrong, wrong, number, text, nested))(draw)


def schema(draw: random.Random) -> str:
    """Draw a response format with a schema from ``bomb``."""
    return '{"type":"json_schema","json_schema":{"name":"x","schema":' + bomb(draw) + "}}"


def bomb(draw: random.Random) -> str:
    """Draw a JSON schema that is small to send and large to compile, or that is meaningless."""
    return draw.choice(
        (
            _laughs(draw.choice((10, 20))),
            json.dumps(
                {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
            ),
            json.dumps({"enum": [f"v{draw.random()}" for _ in range(2000)]}),
            json.dumps({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1500)}}),
            json.dumps({"type": "string", "minLength": 1 << 30}),
            json.dumps({"type": "string", "maxLength": draw.randint(1 << 14, 1 << 20)}),
            json.dumps({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
            json.dumps({"type": "string", "pattern": draw.choice(_PATTERNS)}),
            json.dumps({"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
            json.dumps({"patternProperties": {draw.choice(_PATTERNS): {"type": "null"}}}),
            json.dumps({"type": "nonsense", "properties": 7}),
            json.dumps({"allOf": [{"type": "string"}, {"type": "integer"}]}),
            json.dumps({"$ref": "http://127.0.0.1:9/schema.json"}),
            json.dumps({"$ref": "file:///etc/passwd"}),
            nested(draw),
        )
    )


_PATTERNS: Final = (
    "(a+)+$",
    "(a{1000}){1000}",
    "(",
    "[",
    "a{99999999}",
    "(?=x)y",
    "\\1",
    "(?P<n>a)(?P=n)",
    "x" * 5000,
)


def _laughs(levels: int) -> str:
    """Return a schema of which each level refers twice to the next ("billion laughs")."""
    levels_of = {
        f"l{n}": {"type": "object", "properties": {side: {"$ref": f"#/$defs/l{n + 1}"} for side in "ab"}}
        for n in range(levels)
    }
    return json.dumps({"$ref": "#/$defs/l0", "$defs": {**levels_of, f"l{levels}": {"type": "null"}}})


def grammar(draw: random.Random) -> str:
    """Draw a field that constrains the output by a regex, choices or a grammar."""
    kind = draw.choice(("guided_regex", "guided_choice", "guided_grammar"))
    value = {
        "guided_regex": json.dumps(draw.choice(_PATTERNS)),
        "guided_choice": json.dumps(["c" * 4096] * draw.choice((1, 1024, 1025))),
        "guided_grammar": json.dumps(
            draw.choice(
                ("root ::= root", "root ::= a\na ::= root a | a", "root ::=", "x" * 300_000, 'root ::= "a"*')
            )
        ),
    }[kind]
    return f'"{kind}":{value}'
