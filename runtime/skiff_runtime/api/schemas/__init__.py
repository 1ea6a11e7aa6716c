"""Request and response bodies of the API, and the validation of requests."""
