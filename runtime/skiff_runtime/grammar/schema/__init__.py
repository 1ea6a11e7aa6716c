"""JSON schemas, lowered to the subset that xgrammar's grammars enforce in full."""
