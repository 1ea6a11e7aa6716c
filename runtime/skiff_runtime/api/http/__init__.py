"""HTTP: the protocol and its limits, access control, request headers and bodies, and responses."""
