"""huggingface_hub, set up before it is imported, for it reads its environment only then; what the user has set wins.

No telemetry; bars on a terminal only; no warnings, which quote the signed addresses of a storage; and no second copy
of what comes by Xet.
"""

import os
import sys

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")
if not sys.stderr.isatty():
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from huggingface_hub import constants

__all__ = ["constants"]
