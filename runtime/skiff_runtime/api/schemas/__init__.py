"""Request and response bodies of the API, as pydantic models."""
