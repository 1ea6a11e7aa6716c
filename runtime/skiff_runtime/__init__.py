"""The inference runtime: a multi-process server for large language models.

It depends on models and devices, never on Kubernetes. Import ``LLM`` and ``SamplingParams`` from here for
offline inference.
"""

from typing import TYPE_CHECKING

from skiff_runtime.version import __version__ as __version__

if TYPE_CHECKING:
    from skiff_runtime.offline.llm import LLM as LLM
    from skiff_runtime.offline.sampling_params import SamplingParams as SamplingParams


def __getattr__(name: str) -> object:
    """Import the offline classes on first use, so that the front-end processes do not load their dependencies."""
    if name == "LLM":
        from skiff_runtime.offline.llm import LLM

        return LLM
    if name == "SamplingParams":
        from skiff_runtime.offline.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
