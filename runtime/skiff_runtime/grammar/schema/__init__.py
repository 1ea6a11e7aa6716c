"""JSON schemas: lowered to the subset that xgrammar enforces completely, and converted to EBNF."""
