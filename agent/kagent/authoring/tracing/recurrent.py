"""Recurrent layers as one operation each, where sizes alone are computed.

torch has a GRU, an LSTM and plain recurrent layers as operations. On tensors without values it runs
them step by step, so that the number of steps is fixed and the graph as long as that. The shapes of
their results follow from their inputs' at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_GATES = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}
"""torch's names of the operations, and how many times a state's width their weights have."""


def _results(
    gates: int,
    input: torch.Tensor,  # noqa: A002
    hx: Any,
    weights: Sequence[torch.Tensor],
    *rest: Any,
) -> tuple[torch.Tensor, ...]:
    """Results without values: of each step, and the states after the last."""
    states = hx if isinstance(hx, list | tuple) else [hx]
    layers, both = rest[1], 2 if rest[-2] else 1  # directions
    _require_sizes(gates, input, states, weights, layers, both)
    steps = input.new_empty((*input.shape[:-1], both * states[0].shape[-1]))
    return (steps, *(s.new_empty(s.shape) for s in states))


def _require_sizes(
    gates: int,
    input: torch.Tensor,  # noqa: A002
    states: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    layers: int,
    both: int,
) -> None:
    """Demand of the weights' sizes what torch does when it runs the steps."""
    out, cell = states[0].shape[-1], states[-1].shape[-1]
    count = len(weights) // (layers * both)
    for i in range(0, len(weights), count):
        from_input, from_state, *others = weights[i : i + count]
        width = input.shape[-1] if i < count * both else both * out
        pairs = [(from_input.shape[1], width), (from_state.shape[1], out)]
        pairs += [(w.shape[0], gates * cell) for w in (from_input, from_state)]
        for other in others:
            if other.dim() == 1:
                pairs.append((other.shape[0], gates * cell))
            else:  # an LSTM's projection
                pairs += [(other.shape[0], out), (other.shape[1], cell)]
        for size, needed in pairs:
            torch._check(size == needed)  # type: ignore[no-untyped-call] # noqa: SLF001


@contextmanager
def unrolled_never() -> Iterator[None]:
    """Let make_fx see the layers as operations."""
    found = [getattr(torch.ops.aten, name).input for name in _GATES]
    before = [dict(op.py_kernels) for op in found]
    try:
        for op, gates in zip(found, _GATES.values(), strict=True):
            op.py_kernels.update(dict.fromkeys(op.py_kernels, partial(_results, gates)))
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
        name = getattr(func, "__name__", "")
        layer = name in _GATES and not kwargs
        if not layer or not isinstance(args[2], list | tuple):  # of packed sequences
            return func(*args, **(kwargs or {}))
        results = _results(_GATES[name], *args)
        calls = math.prod(args[0].shape[:-1])
        weights = [w for w in args[2] if w.dim() == 2]
        self.products = self.products + 2 * calls * sum(w.numel() for w in weights)
        self.elements = self.elements + calls * sum(w.shape[0] for w in weights)
        return results
