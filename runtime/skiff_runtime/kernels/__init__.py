"""The small device operations that backends and layers share."""
