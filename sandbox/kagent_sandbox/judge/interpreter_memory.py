"""Memory for Triton's interpreter of what it works out anew at every operation.

It makes the type and the shape of each block, looks for a dtype in a table that it builds for that,
compares types and shapes that are the same object, and at every launch searches all of Triton's
language for the functions to replace. What comes of these is the same each time (Triton 3.6 to
3.9).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

_language: Any = tl.core  # its classes are changed here
_semantic: Any = TritonSemantic
_OWN_FIELDS = ("handle", "type", "dtype")
_ITSELF = frozenset({int, float, bool, str, type(None), tl.dtype, tl.tensor})
"""Types of values that are no constant of the language and hold none."""


def remember() -> None:
    """Have this process's interpreter remember. To be called once, before the first launch."""
    module: Any = interpreter
    module._get_np_dtype = _numpy_dtype(module._get_np_dtype)  # noqa: SLF001
    module._patch_builtin = _patch_known(module._patch_attr)  # noqa: SLF001
    block, tensor = _language.block_type, _language.tensor
    block.__init__ = _block_type(block.__init__)
    block.with_element_ty = _with_element(block.with_element_ty)
    tensor.__init__ = _tensor(tensor.__init__)
    _language.tuple.__eq__ = _same_or_equal(_language.tuple.__eq__, _language.constexpr(True))
    _language.dtype.__eq__ = _same_or_equal(_language.dtype.__eq__, True)
    _language._unwrap_if_constexpr = _unwrap(_language._unwrap_if_constexpr)  # noqa: SLF001
    _semantic.cast = _cast(_semantic.cast)
    _semantic.broadcast_impl_value = _broadcast(_semantic.broadcast_impl_value)
    _semantic.computation_type_impl = _computation_type(_semantic.computation_type_impl)


def _numpy_dtype(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.is_ptr():
            return np.dtype(np.uint64)
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    return numpy_dtype


def _patch_known(patch_attr: Callable[..., None]) -> Callable[..., None]:
    names: dict[Any, list[str]] = {}

    def patch(package: Any, *rest: Any) -> None:
        is_builtin = _language.is_builtin
        if package not in names:
            members = inspect.getmembers(package)
            names[package] = [name for name, member in members if is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if is_builtin(member):  # and not patched already
                patch_attr(package, name, member, *rest)

    return patch


def _block_type(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[object, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if not isinstance(shape, list | _language.tuple):
            original(self, element_ty, shape)  # which refuses it
            return
        sizes = tuple(
            [s.value if type(s) is tl.constexpr else s for s in getattr(shape, "values", shape)]
        )
        key = element_ty.name, sizes, *map(type, sizes)
        if key in known:
            self.__dict__.update(known[key])
            self.element_ty = element_ty
        else:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))

    return init


def _with_element(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    known: dict[object, Any] = {}

    def with_element(self: Any, element_ty: Any) -> Any:
        if self.element_ty is element_ty:
            return self
        key = element_ty.name, _sizes(self)
        found = known.get(key)
        if found is None or found.element_ty is not element_ty:
            known[key] = found = original(self, element_ty)
        return found

    return with_element


def _tensor(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[object, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - as Triton calls it
        sizes = _sizes(type) if type.is_block() else ()
        if sizes in known:
            self.__dict__.update(known[sizes])
            self.handle, self.type, self.dtype = handle, type, type.scalar
        else:
            original(self, handle, type)
            known[sizes] = {k: v for k, v in vars(self).items() if k not in _OWN_FIELDS}

    return init


def _sizes(block: Any) -> tuple[int, ...]:
    """Sizes of a block's type, without a call of the language's own tuple for each."""
    return tuple(getattr(block.shape, "values", block.shape))


def _unwrap(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def unwrap(value: Any) -> Any:
        return value if type(value) in _ITSELF else original(value)

    return unwrap


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(self: Any, value: Any, wanted: Any, *rest: Any, **named: Any) -> Any:
        if value.type.scalar is wanted.scalar:
            return value
        return original(self, value, wanted, *rest, **named)

    return cast


def _broadcast(original: Callable[..., Any]) -> Callable[..., Any]:
    def broadcast(self: Any, one: Any, other: Any) -> Any:
        first, second = one.type, other.type
        if first.is_block() and second.is_block() and _sizes(first) == _sizes(second):
            return one, other
        return original(self, one, other)

    return broadcast


def _computation_type(original: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[object, Any] = {}

    def computation_type(
        self: Any, one: Any, one_is_scalar: bool, other: Any, other_is_scalar: bool, divides: bool
    ) -> Any:
        key = one.name, one_is_scalar, other.name, other_is_scalar, divides
        if key not in known:
            known[key] = original(self, one, one_is_scalar, other, other_is_scalar, divides)
        return known[key]

    return computation_type


def _same_or_equal(original: Callable[[Any, Any], Any], same: Any) -> Callable[[Any, Any], Any]:
    def equal(self: Any, other: Any) -> Any:
        return same if self is other else original(self, other)

    return equal
