"""Formats of the generation endpoints: from a body to a request, and from tokens to a response."""
