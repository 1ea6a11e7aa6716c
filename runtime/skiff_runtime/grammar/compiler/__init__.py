"""Grammar compilation by xgrammar, in a process of its own.

``compile_queue`` is the interface of a tokenizer process. It imports neither xgrammar nor torch; only
``compiler_process`` and ``grammar_compiler``, which run in the child process, do.
"""
