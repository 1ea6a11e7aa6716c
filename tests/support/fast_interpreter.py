"""Caches for Triton's interpreter, so that kernel tests take less time.

By itself it patches ``triton.language`` at every call of a function, and makes the same types anew at every instruction.
"""

import inspect
import math
from functools import cache
from typing import Any, Final

import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

KNOWN_VERSION: Final = "3.6."


def speed_up_interpreter() -> None:
    """Install the caches; the results of kernels stay the same.

    The tests' kernels compute a few numbers with each instruction, so the interpreter's bookkeeping takes most of the
    time. A version of Triton other than ``KNOWN_VERSION`` has other internals and is left as it is.
    """
    if not triton.__version__.startswith(KNOWN_VERSION):
        return
    # Integer arithmetic is repeated in more bits to detect overflow, which only a kernel in debug mode reports.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_the_language_once()
    _remember_types()


def _patch_the_language_once() -> None:
    """Patch ``triton.language`` when a kernel is launched, and not again at each call of a function by the kernel."""
    patch_lang, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    patched: set[str] = set()

    @cache
    def find_languages(function: Any) -> frozenset[str]:
        modules = filter(inspect.ismodule, function.__globals__.values())
        return frozenset(each.__name__ for each in modules if each in (tl, core))

    def patch(function: Any) -> Any:
        languages = find_languages(function)
        if languages and languages <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages)
        return patch_lang(function)

    def restore_language(scope: Any) -> None:
        """Undo the patches; the interpreter calls it at the end of a launch only."""
        patched.clear()
        restore(scope)

    interpreter._patch_lang, interpreter._LangPatchScope.restore = patch, restore_language


def _remember_types() -> None:
    """Keep what follows from a shape or a type alone."""
    sizes: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    numpy_types: dict[str, Any] = {}
    find_numpy_type, make_block_type = interpreter._get_np_dtype, core.block_type.__init__

    @cache
    def make_constants(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(shape)), core.tuple([core.constexpr(size) for size in shape])

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = make_constants(tuple(type.shape.values) if type.is_block() else ())

    def make_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(shape)
        known = sizes.get(key) if all(type(size) is int for size in key) else None
        if known is None:
            make_block_type(self, element_ty, shape)
            sizes[tuple(self.shape.values)] = self.shape, self.numel, f"<{self.shape}, "
            return
        self.element_ty = element_ty
        self.shape, self.numel, name = known
        self.name = f"{name}{element_ty}>"

    def numpy_type(given: Any) -> Any:
        scalar = given.scalar
        known = numpy_types.get(scalar.name)
        if known is None:
            known = numpy_types[scalar.name] = find_numpy_type(given)
        return known

    core.tensor.__init__, core.block_type.__init__ = make_tensor, make_type
    interpreter._get_np_dtype = numpy_type
