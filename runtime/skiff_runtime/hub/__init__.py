"""Models of a Hugging Face hub: naming, choosing, downloading, verifying and finding them in the hub's cache.

huggingface_hub downloads; what belongs here is around it: one writer at a time, the choice of files, checksums, a
marker that makes a finished model serve without any network, and errors that say what to change. Only what concerns
``hf://`` belongs here. It imports no torch: an init container runs it.
"""

import os
import sys

# huggingface_hub reads its environment when it is imported, which is after this; what the user has set wins. No telemetry;
# bars on a terminal only; no warnings, which quote the signed addresses of a storage; no second copy of what comes by Xet.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")
if not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
