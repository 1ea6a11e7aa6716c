"""Model of ``demo://``: a small Llama with its tokenizer, trained by ``runtime/training``. Data only."""

from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parent
