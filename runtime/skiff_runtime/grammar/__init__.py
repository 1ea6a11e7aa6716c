"""Structured output: what an answer must match, compiled for the vocabulary and followed token by token."""
