"""Pure builders, one per Kubernetes kind: (InferenceService, settings) to a plain dict. No I/O, no clock."""
