"""The HTTP front: FastAPI app, OpenAI schemas, SSE streaming, probes. Never imports the engine."""
