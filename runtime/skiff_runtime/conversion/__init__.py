"""Tokenizer conversion: a tokenizer.json for models without one, made once by transformers in a child process."""
