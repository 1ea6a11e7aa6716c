"""The inference runtime: a multi-process server for large language models.

It knows models and devices, never Kubernetes. Import ``LLM`` from here for offline use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skiff_runtime.offline.llm import LLM as LLM

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Load ``LLM`` on first use, so that the front processes stay free of its imports."""
    if name == "LLM":
        from skiff_runtime.offline.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
