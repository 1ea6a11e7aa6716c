"""From the fields of a request that describe its answer to the grammar that the answer must match."""

from skiff_runtime.api.format_schemas import JsonSchemaFormat, StructuredOutputFields
from skiff_runtime.api.schemas.request_bodies import Sampling
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.spec import (
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from skiff_runtime.messages import Grammar


def build_response_grammar(body: StructuredOutputFields) -> Grammar | None:
    """None: any text will do. Raises ``InvalidRequest``."""
    chosen = body.chosen()
    if len(chosen) > 1:
        first, second, *_ = chosen
        raise InvalidRequest(
            f"'{first}' and '{second}' both say what the answer must match; send one", param=second
        )
    for param, value in chosen.items():
        match param:
            case "guided_json":
                return json_schema_grammar(value, param)
            case "guided_regex":
                return regex_grammar(value, param)
            case "guided_choice":
                return choice_grammar(value, param)
            case "guided_grammar":
                return ebnf_grammar(value, param)
        if isinstance(value, JsonSchemaFormat):
            return json_schema_grammar(value.json_schema.json_schema, param)
        return json_object_grammar()
    return None


def check_grammar_conflicts(body: Sampling, grammar: Grammar | None) -> Grammar | None:
    """``grammar``, which goes with the rest of the request. Raises ``InvalidRequest``."""
    for param in ("ignore_eos", "min_tokens"):
        if grammar is not None and getattr(body, param):
            raise InvalidRequest(
                f"'{param}' contradicts an answer that must match a grammar, which ends where the grammar ends; "
                "remove one of them",
                param=param,
            )
    return grammar
