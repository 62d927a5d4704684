"""Writes into lists of tensors, as torch's `_foreach` operations do them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from kagent_sandbox.data.operation_schema import is_write
from torch.autograd.graph import increment_version
from torch.overrides import TorchFunctionMode


class CountedListWrites(TorchFunctionMode):
    """Has a tensor's version count writes by an operation on lists: on tensors without values torch
    counts those of operations on single tensors alone.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch, and count what it wrote."""
        given = kwargs or {}
        # Nothing counts writes to tensors of inference mode; inputs are none of these.
        written = [t for t in lists_written(func, args, given) if not t.is_inference()]
        before = [t._version for t in written]  # noqa: SLF001 - the one way to see a write
        out = func(*args, **given)
        same = [t for t, n in zip(written, before, strict=True) if t._version == n]  # noqa: SLF001
        if same:
            increment_version(same)
        return out


def lists_written(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Tensors of the lists that a call of a function of torch writes in place."""
    packet: Any = getattr(func, "overloadpacket", None)
    packet = packet or getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    if packet is None or not hasattr(packet, "overloads"):
        return
    schema = getattr(packet, packet.overloads()[0])._schema  # noqa: SLF001 - the same in all
    for i, parameter in enumerate(schema.arguments):
        if not is_write(parameter):
            continue
        value = args[i] if i < len(args) else kwargs.get(parameter.name)
        if isinstance(value, list | tuple):
            yield from (t for t in value if isinstance(t, torch.Tensor))
