"""The generation endpoints: from a request body to a ``RequestSpec``, and from tokens to a response."""
