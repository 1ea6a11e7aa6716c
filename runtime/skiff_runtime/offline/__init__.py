"""The offline LLM class: generation in the caller's process, without HTTP."""
