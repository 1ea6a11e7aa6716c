"""The tokenizer and detokenizer processes: text to token ids, and token ids to text increments."""
