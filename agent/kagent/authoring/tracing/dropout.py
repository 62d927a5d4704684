"""Dropout is left out of operations: a task's results are no chance."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

LEFT_OUT = "dropout is left out: a task's results are no chance"
_DROPOUT = re.compile(r"(feature_)?dropout([123]d)?_?")
_ATTENTION = "scaled_dot_product_attention"
_PLACE = 4  # of attention's dropout_p


class WithoutDropout(TorchFunctionMode):
    """Leaves out the dropout that a function calls by itself. Modules for it lose theirs when an
    operation is made.

    Attributes:
        found: Whether a call would have dropped anything.
    """

    def __init__(self) -> None:
        """Nothing was called yet."""
        super().__init__()
        self.found = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch without its dropout."""
        given: dict[str, Any] = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if _DROPOUT.fullmatch(name):
            known: dict[str, Any] = {"p": 0.5, "training": True}
            known |= dict(zip(("input", "p", "training"), args, strict=False)) | given
            self.found |= bool(known["training"] and known["p"] > 0)
            return known["input"]
        if name == _ATTENTION:
            share = args[_PLACE] if len(args) > _PLACE else given.pop("dropout_p", 0.0)
            self.found |= share > 0
            args = tuple(0.0 if i == _PLACE else each for i, each in enumerate(args))
        return func(*args, **given)
