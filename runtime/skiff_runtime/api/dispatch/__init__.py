"""Requests in flight: admission, the way to the tokenizers, and the writing of responses."""
