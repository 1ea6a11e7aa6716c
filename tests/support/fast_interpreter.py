"""Makes Triton's interpreter faster, with the same results: it computes the same things again at every instruction."""

import inspect
import math
from typing import Any, Final

import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

KNOWN_VERSION: Final = "3.6."


def speed_up_interpreter() -> None:
    """Replace what takes most of the time of a kernel's instructions, which have only a few numbers each here.

    Other versions of Triton than the one whose internals this knows stay as they are.
    """
    if not triton.__version__.startswith(KNOWN_VERSION):
        return
    # The sums that would detect overflow are made but not looked at: kernels are not compiled for debugging.
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_the_language_once()
    _remember_types()


def _patch_the_language_once() -> None:
    """Patch ``triton.language`` when a kernel is launched, not again at each call of a function by the kernel."""
    patch_lang = interpreter._patch_lang
    patched: set[str] = set()
    visible: dict[Any, set[str]] = {}

    class Scope(interpreter._LangPatchScope):  # type: ignore[misc]
        """What the launch restores; functions that the kernel calls never restore what they patch."""

        def restore(self) -> None:
            patched.clear()
            super().restore()

    def patch(function: Any) -> Any:
        languages = visible.get(function)
        if languages is None:
            modules = filter(inspect.ismodule, function.__globals__.values())
            languages = visible[function] = {each.__name__ for each in modules if each in (tl, core)}
        if languages and languages <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages)
        scope = patch_lang(function)
        scope.__class__ = Scope
        return scope

    interpreter._patch_lang = patch


def _remember_types() -> None:
    """Look up what follows from a shape or a type alone."""
    sizes: dict[tuple[Any, ...], tuple[Any, int, str]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}
    find_numpy_type, make_block_type = interpreter._get_np_dtype, core.block_type.__init__

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        shape = tuple(type.shape.values) if type.is_block() else ()
        known = shapes.get(shape)
        if known is None:
            constants = core.tuple([core.constexpr(size) for size in shape])
            known = shapes[shape] = core.constexpr(math.prod(shape)), constants
        self.numel, self.shape = known

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
