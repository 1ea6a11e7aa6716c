"""The model's tokenizer files: encoder, streaming decoder, byte-level table, chat template."""
