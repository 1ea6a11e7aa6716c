"""One file per model family, the registry, configuration and weight loading."""
