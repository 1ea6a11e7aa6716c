"""The processes of one service: supervisor, child processes, their launch file, and the resolved configuration.

``launch`` and ``child_process`` are the base of every process's main function; that of a role is named as a
string in ``child_process``, so nothing here imports api, tokenizer or worker.
"""
