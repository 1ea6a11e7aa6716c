"""Path operations of the API."""
