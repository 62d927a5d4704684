"""Dispatch of an operator's call: to a kernel, loaded and configured, or to the reference."""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _devices, _kernels
from ._portfolio import Chosen, DeviceEntry, Portfolio, ReferenceCall, Size, read_portfolio
from ._repeated import Repeated

_FOLDER = Path(__file__).parent
_NOT_THE_CALLERS = (f"{_FOLDER}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}")
_MOST_CALLS = 4096  # that a choice is remembered for: shapes of one program


def _entry(device: torch.device) -> DeviceEntry:
    """A device as tables name it, without what was measured on it."""
    name, kind = _devices.device_name(device), _devices.kind(device)
    return DeviceEntry(name, kind, _devices.capability(device), ())


class FallbackWarning(UserWarning):
    """torch's own implementation is used where a kernel of the library was asked for."""


def warn(text: str) -> None:
    """Give a FallbackWarning for the line that called the library: the first that is neither the
    library's nor torch's.
    """
    frame, level = sys._getframe(), 1  # noqa: SLF001 - inspect.stack reads every source file
    while frame.f_code.co_filename.startswith(_NOT_THE_CALLERS) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, FallbackWarning, stacklevel=level)


@dataclass(frozen=True, slots=True)
class Call:
    """The way to run calls of one kind."""

    function: Repeated
    kernel: str
    pitched: bool
    repeats: bool  # whether equal calls have equal bits
    guard: torch.device | None  # to be made the current one


class Dispatch:
    """The choices of one operator. `calls` remembers them; None stands for the reference."""

    def __init__(self, task: str, operator: str) -> None:
        """Choose among the kernels of a task; warnings name the operator."""
        self._path = _FOLDER / "portfolio" / f"{task}.json"
        self._operator = operator
        self._table: Portfolio | None = None
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        self.calls: dict[tuple[object, ...], Call | None] = {}
        self.loaded: dict[tuple[str, int], Callable[..., Any]] = {}
        self.failed: set[str] = set()
        self.number = len(_all)
        _all.append(self)

    def least(self) -> int:
        """Elements of a call's tensors together below which no kernel is used; 0 if not known."""
        try:
            return int(json.loads(self._path.read_text(encoding="utf-8")).get("least", 0))
        except (OSError, ValueError):  # there is no table, or one that a call will tell of
            return 0

    def knows(self, device: torch.device, dtypes: Sequence[str]) -> bool:
        """Whether there is a kernel for calls of some shape. Gives the warning where there is none.

        Args:
            device: Of all tensors.
            dtypes: Of a call's arguments; "" of those that are no tensors.
        """
        if not self._path.is_file() or device.type == "meta":
            return False
        try:
            table, entry = self._read(), _entry(device)
            dtype = table.dtype_among(dtypes)
            reason = table.lacks(entry, dtype)
        except (OSError, ValueError, KeyError) as e:
            self._warn_of_table(e)
            return False
        if reason is not None:
            self.warn(f"{entry.name} {dtype}", reason)
        return reason is None

    def choose(
        self,
        key: tuple[object, ...],
        tensors: Sequence[torch.Tensor],
        dims: Callable[..., Mapping[str, Size] | None],
        args: Sequence[Any],
    ) -> Call | None:
        """Choose how to run calls that agree in `key`, and remember the choice."""
        with self._lock:
            call = self._choice(tensors, dims, args)
            if len(self.calls) >= _MOST_CALLS:
                self.calls.clear()
            self.calls[key] = call
            return call

    def give_up(self, kernel: str, error: Exception) -> None:
        """Leave a kernel alone from now on."""
        with self._lock:
            self.failed.add(kernel)
            for key, call in list(self.calls.items()):
                if call is not None and call.kernel == kernel:
                    self.calls[key] = None
        told = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        self.warn(f"kernel {kernel}", f"its kernel {kernel} does not run here ({told})")

    def _choice(
        self,
        tensors: Sequence[torch.Tensor],
        dims: Callable[..., Mapping[str, Size] | None],
        args: Sequence[Any],
    ) -> Call | None:
        if not tensors or any(t.numel() == 0 for t in tensors):
            return None
        where = tensors[0].device
        if where.type == "meta":
            return None
        sizes = dims(*args)
        if sizes is None or any(t.device != where for t in tensors):
            return None
        device = _entry(where)
        try:
            if not self._path.is_file():
                return None  # an operator for which the library has no kernels
            table = self._read()
            dtype = table.dtype_of(args)
            chosen = table.choose(device, dtype, sizes, self.failed)
        except (OSError, ValueError, KeyError) as e:
            self._warn_of_table(e)
            return None
        if isinstance(chosen, ReferenceCall):
            if chosen.reason is not None:
                self.warn(f"{device.name} {dtype}", chosen.reason)
            return None
        return self._call(table.entry, chosen, where)

    def _read(self) -> Portfolio:
        if self._table is None:
            self._table = read_portfolio(self._path)
        return self._table

    def _call(self, entry: str, chosen: Chosen, device: torch.device) -> Call | None:
        kernel, config = chosen.kernel, chosen.config
        function = self.loaded.get((kernel.id, config))
        if function is None:
            try:
                function = _kernels.load(
                    __package__ or "",
                    _FOLDER / "kernels" / f"{kernel.id}.py",
                    entry,
                    kernel.configs[config],
                    str(config),
                )
            except Exception as e:  # noqa: BLE001 - a kernel's file may need what is not there
                self.give_up(kernel.id, e)
                return None
            self.loaded[kernel.id, config] = function
        guard = device if device.type == "cuda" and torch.cuda.device_count() > 1 else None
        return Call(Repeated(function), kernel.id, kernel.pitched, kernel.repeats, guard)

    def _warn_of_table(self, error: Exception) -> None:
        self.warn("table", f"its table cannot be read ({type(error).__name__}: {error})")

    def warn(self, about: str, reason: str) -> None:
        """Give a warning that torch is used, once for each thing that it is about."""
        with self._lock:
            if about in self._warned:
                return
            self._warned.add(about)
        warn(f"{self._operator}: torch's own implementation is used: {reason}.")


_all: list[Dispatch] = []


def has_kernels(number: int, kind: str, index: int | None, dtypes: Sequence[str]) -> bool:
    """Answer of `knows` of the dispatch with a number, for "cuda" and 0, say. torch.compile takes it
    for a constant: it stands in the compiled program, and is not looked into.
    """
    device = torch.device(kind) if index is None else torch.device(kind, index)
    return _all[number].knows(device, dtypes)


# What torch.compiler.assume_constant_result does, for which it imports all of the compiler.
has_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001
