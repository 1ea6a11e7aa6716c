"""Support of a request field: served, accepted as a hint, or refused.

Each field declares its class where it is declared itself, by an annotation. A field without one is served. Everything
else follows from the annotation: the 400 messages, what ``--strict`` refuses, and the table of docs/api.md, which a test
compares with the declarations.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pydantic import GetCoreSchemaHandler, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

UNSUPPORTED: Final = "unsupported_field"
"""The type of a validation error whose message is the advice of a ``Hint`` or of ``Refused``."""
STRICT: Final = "strict"
"""The validation context with which hints are refused."""


class Support(StrEnum):
    """The class of a field."""

    SERVED = "served"
    HINT = "hint"
    """Accepted: no value of it changes the answer."""
    REFUSED = "refused"
    """A value that would change the answer is a 400, because it is not served."""


@dataclass(frozen=True, slots=True)
class Hint:
    """Marks a field that cannot change the answer, or that only the chat template may use.

    With ``--strict`` it accepts only the values ``off``, which ask for nothing, and the error ends with ``advice``.
    """

    advice: str
    off: tuple[Any, ...] = (None,)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the value after its type. The check runs only for requests that send the field."""
        return core_schema.with_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any, info: ValidationInfo) -> Any:
        if info.context is STRICT and value not in self.off:
            raise hint_error(self.advice)
        return value


@dataclass(frozen=True, slots=True)
class Refused:
    """Marks a field whose type accepts only values that ask for nothing; ``advice`` says what to send instead."""

    advice: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Replace every error of the field's type by the advice."""
        return core_schema.custom_error_schema(
            handler(source),
            custom_error_type=UNSUPPORTED,
            custom_error_message=f"not supported: {self.advice}",
        )


def hint_error(advice: str) -> PydanticCustomError:
    """Return the error of a hint that --strict refuses."""
    return PydanticCustomError(UNSUPPORTED, "not supported with --strict: {advice}", {"advice": advice})


def support_of(field: FieldInfo) -> Support:
    """Return the class that a field declares."""
    if any(isinstance(each, Hint) for each in field.metadata):
        return Support.HINT
    if any(isinstance(each, Refused) for each in field.metadata):
        return Support.REFUSED
    return Support.SERVED
