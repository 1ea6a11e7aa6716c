"""GGUF files, the format of llama.cpp: a checked header, its metadata, and the location of every tensor.

What the metadata means for a model is read by ``models`` (configuration, weights) and ``conversion`` (tokenizer).
"""
