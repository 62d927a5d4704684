"""FLOPs of torch's matrix products, convolutions and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def product_counter() -> FlopCounterMode:
    """A context that counts them: `get_total_flops()` of it, afterwards."""
    aten = torch.ops.aten
    names = [f"_scaled_dot_product_{kind}_attention" for kind in ("flash", "efficient", "cudnn")]
    forward = dict.fromkeys([getattr(aten, name) for name in names], _attention_flops)
    gradients = [getattr(aten, f"{name}_backward") for name in names]
    return FlopCounterMode(
        display=False, custom_mapping=forward | dict.fromkeys(gradients, _gradient_flops)
    )


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """Floating-point operations of all scores, as torch counts them. Fewer heads of keys than of
    queries, which torch 2.11 refuses to count, are counted too. Arguments are shapes: [batch,
    heads, length, head size].
    """
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (size + value[3])


def _gradient_flops(
    _: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *__: Any,
    **___: Any,
) -> int:
    """As `_attention_flops`, of the operations behind the gradient, which compute the scores again:
    five products instead of two.
    """
    batch, heads, length, size = query
    return 2 * batch * heads * length * key[2] * (3 * size + 2 * value[3])
