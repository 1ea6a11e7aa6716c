"""Tokenizer and detokenizer workers: text to token ids, and token ids to text increments."""
