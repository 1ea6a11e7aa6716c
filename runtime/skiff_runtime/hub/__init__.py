"""Models of a Hugging Face hub (``hf://``): references, downloads, verification and the hub's cache.

huggingface_hub downloads the files. This package adds the choice of files, checksums, a lock for one writer at a time,
a marker that lets a complete model serve without network, and errors that name the remedy. It imports no torch: an init
container runs it.
"""

import os
import sys

# huggingface_hub reads its environment when it is imported, which is later than this. Variables that the user has set win.
# No telemetry; no warnings, which quote signed storage addresses; no second copy of Xet downloads; progress bars only on
# a terminal.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")
if not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
