"""Memory for Triton's interpreter of what it works out anew at every operation.

It makes the type and the shape of each block, looks for a dtype in a table that it builds for that,
and at every launch searches all of Triton's language for the functions to replace. What comes of
these is the same each time (Triton 3.6 to 3.9).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter

_language: Any = tl.core  # its classes are changed here
_OWN_FIELDS = ("handle", "type", "dtype")


def remember() -> None:
    """Have this process's interpreter remember. To be called once, before the first launch."""
    module: Any = interpreter
    module._get_np_dtype = _numpy_dtype(module._get_np_dtype)  # noqa: SLF001
    module._patch_builtin = _patch_known(module._patch_attr)  # noqa: SLF001
    block, tensor = _language.block_type, _language.tensor
    block.__init__ = _block_type(block.__init__)
    tensor.__init__ = _tensor(tensor.__init__)
    _language.tuple.__eq__ = _same_or_equal(_language.tuple.__eq__)


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
        sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in shape])
        key = str(element_ty), sizes, *map(type, sizes)
        if key in known:
            self.__dict__.update(known[key])
            self.element_ty = element_ty
        else:
            original(self, element_ty, shape)
            known[key] = dict(vars(self))

    return init


def _tensor(original: Callable[..., None]) -> Callable[..., None]:
    known: dict[object, dict[str, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - as Triton calls it
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes in known:
            self.__dict__.update(known[sizes])
            self.handle, self.type, self.dtype = handle, type, type.scalar
        else:
            original(self, handle, type)
            known[sizes] = {k: v for k, v in vars(self).items() if k not in _OWN_FIELDS}

    return init


def _same_or_equal(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def equal(self: Any, other: Any) -> Any:
        return _language.constexpr(True) if self is other else original(self, other)

    return equal
