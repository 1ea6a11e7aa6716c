"""The fields by which a request says what its answer must look like."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue

from skiff_runtime.api.strict import Strict

MAX_GRAMMAR_CHARACTERS: Final = 256 << 10
MAX_ALTERNATIVES: Final = 1024

Schema = Annotated[dict[str, JsonValue], Field(description="a JSON schema, as of draft 2020-12")]
Source = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema under a name. ``strict`` changes nothing: each schema is enforced."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    json_schema: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputFields(Strict):
    """At most one of these says what the answer must match; the ``guided_`` fields are named as in vLLM."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | Source | None = None
    guided_regex: Source | None = None
    guided_choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=4096)]],
            Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True),
        ]
        | None
    ) = None
    guided_grammar: Source | None = None

    def chosen(self) -> dict[str, Any]:
        """The fields of these that constrain the answer, by name."""
        fields = {name: getattr(self, name) for name in StructuredOutputFields.model_fields}
        return {
            name: value
            for name, value in fields.items()
            if not (value is None or isinstance(value, TextFormat))
        }
