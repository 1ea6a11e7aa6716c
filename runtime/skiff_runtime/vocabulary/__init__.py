"""The model's tokenizer as a library: files, chat template, encoder, incremental decoder and the bytes of each token.

Processes of several kinds share it. The processes that tokenize and detokenize are in ``tokenizer/``.
"""
