"""A tokenizer.json for models that come without one, made once by transformers in a child process."""
