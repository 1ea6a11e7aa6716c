"""The Kubernetes operator: reconciles InferenceService objects. It knows Kubernetes, never torch."""
