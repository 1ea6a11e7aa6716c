"""Limits of the counts in a model's configuration, which is not trusted; imports no torch.

Code that reads a configuration loops over layers and experts, in every process, before any tensor is compared with it.
"""

from typing import Final

MAX_LAYERS: Final = 1 << 10
MAX_EXPERTS: Final = 1 << 12
MAX_POSITIONS: Final = 1 << 24
"""From here on, float32 cannot represent every position."""
