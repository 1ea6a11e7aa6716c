"""Models of object stores (``s3://``, ``gs://``) and OCI registries (``oci://``): references, listings and parallel downloads.

A model becomes one directory of the cache, which appears when it is complete and verified. It imports no torch, and the
clients' libraries only for a download.
"""
