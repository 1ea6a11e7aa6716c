"""LoRA adapters: those of InferenceServices and LoRAAdapters, loaded into and unloaded from running pods."""
