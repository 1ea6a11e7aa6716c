"""Parsing of chat output: reasoning and tool calls in the formats that models are trained on, and grammars that enforce them."""
