"""Model families, one file each; the registry, the model configuration and the loading of weights."""
