"""HTTP: the protocol, its limits, access control, request bodies and responses."""
