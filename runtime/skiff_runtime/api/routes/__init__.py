"""Path operations of the API: FastAPI routers, and the generation endpoints, which bypass FastAPI."""
