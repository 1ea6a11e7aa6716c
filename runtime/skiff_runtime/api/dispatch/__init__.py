"""Requests in flight: admission, dispatch to the tokenizer processes, and the writing of responses."""
