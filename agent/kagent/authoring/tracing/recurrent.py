"""Recurrent layers as one operation each, where sizes alone are computed.

torch has a GRU, an LSTM and plain recurrent layers as operations. On tensors without values it runs
them step by step, so that the number of steps is fixed and the graph as long as that. The shapes of
their results follow from their inputs' at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_LAYERS = ("gru", "lstm", "rnn_tanh", "rnn_relu")
"""torch's names of the operations."""


def _results(input: torch.Tensor, hx: Any, *rest: Any) -> tuple[torch.Tensor, ...]:  # noqa: A002
    """Results without values: of each step, and the states after the last."""
    states = hx if isinstance(hx, list | tuple) else [hx]
    both = 2 if rest[-2] else 1  # directions
    steps = input.new_empty((*input.shape[:-1], both * states[0].shape[-1]))
    return (steps, *(s.new_empty(s.shape) for s in states))


@contextmanager
def unrolled_never() -> Iterator[None]:
    """Let make_fx see the layers as operations."""
    found = [getattr(torch.ops.aten, name).input for name in _LAYERS]
    before = [dict(op.py_kernels) for op in found]
    try:
        for op in found:
            op.py_kernels.update(dict.fromkeys(op.py_kernels, _results))
            op._dispatch_cache.clear()  # noqa: SLF001 - torch's own way
        yield
    finally:
        for op, kernels in zip(found, before, strict=True):
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()  # noqa: SLF001 - torch's own way


class OneOperation(TorchFunctionMode):
    """Gives a layer's results without values, and adds up what it computes. A context manager.

    Attributes:
        products: Operations of the layers' matrix products.
        elements: Elements that their other operations compute.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: Any = 0
        self.elements: Any = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run another function, or give the results of a layer."""
        layer = getattr(func, "__name__", "") in _LAYERS
        if not layer or kwargs or not isinstance(args[2], list | tuple):  # or packed sequences
            return func(*args, **(kwargs or {}))
        results = _results(*args)
        calls = math.prod(args[0].shape[:-1])
        weights = [w for w in args[2] if w.dim() == 2]
        self.products = self.products + 2 * calls * sum(w.numel() for w in weights)
        self.elements = self.elements + calls * sum(w.shape[0] for w in weights)
        return results
