"""HTTP API: OpenAI's endpoints and Skiff's own, streaming, access control, probes. Never imports the engine.

Packages from bottom to top: ``http``, ``schemas``, ``parsing``, ``formats``, ``dispatch``, ``routes``.
"""
