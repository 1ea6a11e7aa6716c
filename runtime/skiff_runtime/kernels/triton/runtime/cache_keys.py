"""Triton's cache keys of all kernels, computed in one order, so that every process finds what another compiled.

A kernel's key contains the constants of the functions that it calls, but only of those whose own keys were computed
before (Triton 3.6). So the first kernel to be launched, in the process that compiled and in the one that starts,
would decide which keys are found.
"""

from importlib import import_module
from pkgutil import walk_packages

from skiff_runtime.kernels import triton
from skiff_runtime.kernels.triton_internals import JITFunction


def compute_cache_keys() -> dict[str, str]:
    """Compute the keys of all Triton functions in the order of their modules' names; return them by qualified name.

    Must run before anything is launched.
    """
    names = sorted(each.name for each in walk_packages(triton.__path__, f"{triton.__name__}."))
    modules = [import_module(name) for name in names]
    return {
        f"{module.__name__}.{name}": value.cache_key
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    }
