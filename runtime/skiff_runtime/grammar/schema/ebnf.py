"""Corrections to the EBNF that xgrammar makes of a JSON schema."""

import re
from typing import Final

_ESCAPE_RULE: Final = re.compile(r"^(\w*basic_escape\w*) ::= .*$", re.MULTILINE)
_ESCAPE: Final = r'(([\"\\bfnrt]) | ("u" "0" "0" (("0" [0-7be-f]) | ("1" [0-9a-f]))))'
"""One spelling for each character. With several, ``"\\u0061"`` would be a second way to write the member ``"a"``,
unknown to the rule that keeps other members' names apart from the named ones."""
_COUNTED: Final = r"[^\"\\\r\n]"
_COUNTED_PLAIN: Final = r"[^\0-\x1f\"\\\ud800-\udfff]"
"""The characters of a string of limited length: those of JSON, without control characters and halves of characters."""


def corrected(ebnf: str) -> str:
    """``ebnf`` with one spelling for each string, and with valid JSON only."""
    ebnf = _ESCAPE_RULE.sub(lambda rule: f"{rule[1]} ::= {_ESCAPE}", ebnf)
    return ebnf.replace(_COUNTED, _COUNTED_PLAIN)
