"""JSON schema to EBNF: the schema is lowered, xgrammar converts it, and its EBNF is corrected."""

import json
import re
from typing import Final

import xgrammar

from skiff_runtime.grammar.schema.lowering import lower_schema

MAX_WHITESPACE: Final = 16
"""Most blanks and line ends between two parts of JSON. Without a limit, weak models write them until the end."""

_ESCAPE_RULE: Final = re.compile(r"^(\w*basic_escape\w*) ::= .*$", re.MULTILINE)
_ESCAPE: Final = r'(([\"\\bfnrt]) | ("u" "0" "0" (("0" [0-7be-f]) | ("1" [0-9a-f]))))'
"""One spelling for each character. With several, ``"\\u0061"`` would be a second way to write the property ``"a"``, one
that the rule for the names of additional properties does not exclude."""
_COUNTED: Final = r"[^\"\\\r\n]"
_COUNTED_PLAIN: Final = r"[^\0-\x1f\"\\\ud800-\udfff]"
"""The characters of a string of limited length, without control characters and surrogates, which are not valid JSON."""


def schema_to_ebnf(schema: object) -> str:
    """Convert a JSON schema to EBNF. Raises ``InvalidRequest``, and any exception of xgrammar."""
    source = json.dumps(lower_schema(schema), ensure_ascii=False)
    grammar = xgrammar.Grammar.from_json_schema(source, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    return _correct(str(grammar))


def _correct(ebnf: str) -> str:
    """Return ``ebnf`` with one spelling for each string, and valid JSON only."""
    ebnf = _ESCAPE_RULE.sub(lambda rule: f"{rule[1]} ::= {_ESCAPE}", ebnf)
    return ebnf.replace(_COUNTED, _COUNTED_PLAIN)
