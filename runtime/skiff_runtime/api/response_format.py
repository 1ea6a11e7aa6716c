"""From the fields of a request that describe its answer to the grammar that the answer must match."""

from skiff_runtime.api.format_schemas import Guided, JsonSchemaFormat
from skiff_runtime.api.schemas import Sampling
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.spec import (
    any_object,
    choice_grammar,
    ebnf_grammar,
    regex_grammar,
    schema_grammar,
)
from skiff_runtime.messages import Grammar


def answer_grammar(body: Guided) -> Grammar | None:
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
                return schema_grammar(value, param)
            case "guided_regex":
                return regex_grammar(value, param)
            case "guided_choice":
                return choice_grammar(value, param)
            case "guided_grammar":
                return ebnf_grammar(value, param)
        if isinstance(value, JsonSchemaFormat):
            return schema_grammar(value.json_schema.json_schema, param)
        return any_object()
    return None


def check_with_grammar(body: Sampling, grammar: Grammar | None) -> Grammar | None:
    """``grammar``, which goes with the rest of the request. Raises ``InvalidRequest``."""
    for param in ("ignore_eos", "min_tokens"):
        if grammar is not None and getattr(body, param):
            raise InvalidRequest(
                f"'{param}' contradicts an answer that must match a grammar, which ends where the grammar ends; "
                "remove one of them",
                param=param,
            )
    return grammar
