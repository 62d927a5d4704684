"""Results of the operations of one run of a reference, for further runs that differ in one of them:
what does not follow from that one is not computed again. It is most of the work in a model's step
with 63 million weights.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from kagent_sandbox.data.operation_schema import is_write

_MOST_BYTES = 2 << 30
"""Memory for results that are kept."""


class KnownResults:
    """Results by operation and the memory that it was given, while nothing writes there."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[list[torch.Tensor], Any]] = {}
        self._written: set[int] = set()
        self._bytes = 0

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, keep: bool) -> Any:
        """Result of an operation, as it is known or computed; with `keep` it is known then."""
        if torch.Tag.inplace_view in func.tags:  # such as `squeeze_`, which writes no numbers
            return func(*args, **kwargs)
        if written := {storage_of(t) for t in _writes(func, args, kwargs)}:
            self._forget(written)
            return func(*args, **kwargs)
        key = (func, _key(list(args)), _key(dict(kwargs)))
        if key in self._known:
            return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, self._known[key][1])
        out = func(*args, **kwargs)
        if not keep or func.is_view or torch.Tag.nondeterministic_seeded in func.tags:
            return out
        made = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        given = pytree.tree_leaves((args, kwargs))
        held = [t.detach() for t in (*given, *made) if isinstance(t, torch.Tensor)]
        new_bytes = sum(t.nbytes for t in made)
        if self._bytes + new_bytes <= _MOST_BYTES and self._written.isdisjoint(
            map(storage_of, held)
        ):
            self._bytes += new_bytes
            # Not the tensors themselves: `squeeze_` changes the shape of the one that it is given.
            self._known[key] = held, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        return out

    def _forget(self, written: set[int]) -> None:
        """Drop what was computed from memory that is written to, or lies there."""
        if written <= self._written:
            return
        self._written |= written
        for key, (held, _) in list(self._known.items()):
            if not written.isdisjoint(map(storage_of, held)):
                del self._known[key]


def storage_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, which its views share."""
    address: int = tensor.untyped_storage()._cdata  # noqa: SLF001 - torch's own way
    return address


def _key(value: object) -> object:
    """Key of an argument: of a tensor, the memory and how it lies there. Memory of what is known is
    held, so that no other tensor gets it.
    """
    if isinstance(value, list | tuple):
        return type(value), *map(_key, value)
    if isinstance(value, dict):
        return dict, *((name, _key(v)) for name, v in value.items())
    if not isinstance(value, torch.Tensor):
        return type(value), repr(value)
    layout = value.storage_offset(), value.shape, value.stride(), value.dtype
    return (storage_of(value), *layout, value.is_conj(), value.is_neg())


def _writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Tensors to whose memory an operation writes."""
    for i, name in written_parameters(func):
        value = args[i] if i < len(args) else kwargs.get(name)
        yield from (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))


@functools.cache
def written_parameters(func: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the parameters to whose memory an operation writes."""
    parameters = enumerate(func._schema.arguments)  # noqa: SLF001 - torch's own way
    return tuple((i, p.name) for i, p in parameters if is_write(p))
