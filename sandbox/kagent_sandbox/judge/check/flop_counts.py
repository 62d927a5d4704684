"""FLOPs of torch's matrix products, convolutions and attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def product_counter() -> FlopCounterMode:
    """A context that counts them: `get_total_flops()` of it, afterwards."""
    aten = torch.ops.aten
    kinds = ("flash", "efficient", "cudnn")
    operations = [getattr(aten, f"_scaled_dot_product_{kind}_attention") for kind in kinds]
    return FlopCounterMode(
        display=False, custom_mapping=dict.fromkeys(operations, _attention_flops)
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
