"""Models of a Hugging Face hub: naming, listing, downloading and keeping them in a cache.

Only what concerns ``hf://`` belongs here. It imports no torch: an init container runs it.
"""
