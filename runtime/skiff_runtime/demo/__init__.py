"""The model behind `demo://`: a small Llama with its tokenizer, trained by `runtime/training`. Data only; no code belongs here."""

from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parent
