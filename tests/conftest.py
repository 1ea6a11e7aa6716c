"""Where there is no GPU, Triton's kernels run in its interpreter, which must be said before anything imports Triton."""

import os
from pathlib import Path

if not list(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"
