"""Load generation against a running server."""
