"""Models of a Hugging Face hub: naming, choosing, downloading, verifying and finding them in the hub's cache.

huggingface_hub downloads; what belongs here is around it: one writer at a time, the choice of files, checksums, a
marker that makes a finished model serve without any network, and errors that say what to change. Only what concerns
``hf://`` belongs here. It imports no torch: an init container runs it.
"""
