"""Autocast is refused: its casts depend on the device, and a task is made without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kagent.authoring.errors import AuthoringError

_REFUSAL = (
    "it computes under torch.autocast, whose casts depend on the device: write them out, as in "
    "x.to(torch.bfloat16) @ w.to(torch.bfloat16)"
)


@contextmanager
def autocast_kept() -> Iterator[None]:
    """Let what is made of autocast stay turned on: without a GPU torch would turn it off."""
    kept: Any = torch.autocast
    init = kept.__init__

    def made(
        self: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        init(self, device_type, dtype=dtype, enabled=False, cache_enabled=cache_enabled)
        self._enabled = enabled

    kept.__init__ = made
    try:
        yield
    finally:
        kept.__init__ = init


@contextmanager
def autocast_refused() -> Iterator[None]:
    """Let autocast raise an AuthoringError where it is turned on."""
    refused: Any = torch.autocast
    enter = refused.__enter__

    def entered(self: Any) -> Any:
        if self._enabled:
            raise AuthoringError(_REFUSAL)
        return enter(self)

    refused.__enter__ = entered
    try:
        with autocast_kept():
            yield
    finally:
        refused.__enter__ = enter
