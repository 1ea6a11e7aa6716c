"""The version of this release, of the runtime and of the operator."""

__version__ = "0.1.0"
