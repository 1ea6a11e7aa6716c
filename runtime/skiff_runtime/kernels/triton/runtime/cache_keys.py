"""Keys by which Triton finds what is compiled, made the same in every process.

A function's key holds the constants of functions that it calls, but only of those whose own keys were asked for before (Triton
3.6). So whatever was launched first, in the process that compiled and in this one, would decide what is found.
"""

from importlib import import_module
from pkgutil import walk_packages

from skiff_runtime.kernels import triton as fused
from skiff_runtime.kernels.triton_internals import JITFunction


def compute_cache_keys() -> dict[str, str]:
    """Ask for the keys of all functions here, in one order; before anything is launched. Tell them."""
    names = sorted(each.name for each in walk_packages(fused.__path__, f"{fused.__name__}."))
    modules = [import_module(name) for name in names]
    return {
        f"{module.__name__}.{name}": value.cache_key
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    }
