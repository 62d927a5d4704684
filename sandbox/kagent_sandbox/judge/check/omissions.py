"""References with one operation left out: what a task's check cases must tell from the reference.

The reference runs in a dispatch mode of torch, which sees each operation that it comes down to. An
operation is known by its place in reference.py, so that all passes of a loop leave out the same
one. Left out means: the result is one of its inputs, where one has the result's shape and kind, and
zeros elsewhere; a comparison holds everywhere, or nowhere; an optional tensor, such as a bias or a
mask, is not given; `is_causal` is not set. What only allocates, converts or moves data stays.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kagent_sandbox.data.operation_schema import is_write
from kagent_sandbox.judge.check.known_results import KnownResults

_STAY = frozenset(
    {
        *("_to_copy", "alias", "clone", "contiguous", "copy_", "detach", "lift_fresh", "set_"),
        "lift_fresh_copy",
        *("cat", "stack", "repeat", "repeat_interleave", "flip", "roll", "_unsafe_view"),
        *("fill_", "zero_", "resize_", "_local_scalar_dense", "bernoulli_", "normal_", "uniform_"),
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
        *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"),
    }
)
"""Operations that only allocate, convert, move or draw data."""
ZEROS, _TRUE, _FALSE = "zeros instead", "true everywhere", "false everywhere"
_MOST_TEXT = 60


@dataclass(frozen=True, slots=True)
class Omission:
    """One operation left out in one way.

    Attributes:
        function: Function of reference.py that calls it.
        line: Line of reference.py.
        column: Column of that line, from 0.
        text: What is written there.
        operation: torch's name of the operation.
        how: What is there instead.
    """

    function: str
    line: int
    column: int
    text: str
    operation: str
    how: str

    @property
    def call_id(self) -> tuple[str, int, int, str]:
        """Key that is equal for all operations of one call, and all ways of leaving them out."""
        return self.function, self.line, self.column, self.text

    @property
    def words(self) -> str:
        """Text without the place in the file: as `without_effect` names an operation."""
        return f"{self.text} without its {self.operation} ({self.how})"

    def __str__(self) -> str:
        return f"reference.py:{self.line}: {self.words}"


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows from where in a file an operation comes."""

    def __init__(self, file: Path) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._file = str(file)
        linecache.checkcache(self._file)  # it may have been written anew

    def frame(self) -> FrameType | None:
        """The frame of the file that runs now; None where the operation comes from elsewhere."""
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - there is no other way
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        return frame


class OmissionRecorder(Watching):  # type: ignore[no-untyped-call]
    """Finds the operations of a reference that can be left out. A context manager.

    Attributes:
        found: The omissions, in the order in which they ran.
        known: Results of the operations.
    """

    def __init__(self, file: Path, *, keep: bool = True) -> None:
        """Know nothing yet.

        Args:
            file: reference.py, as it was imported.
            keep: Whether results are kept, for an `Omitter`.
        """
        super().__init__(file)
        self.found: dict[Omission, None] = {}
        self.known = KnownResults()
        self._keep = keep

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and note it."""
        kwargs = kwargs or {}
        out = self.known.run(func, args, kwargs, keep=self._keep)
        frame = None if _stays(func) else self.frame()
        if frame is not None:
            self.found |= dict.fromkeys(omissions_of(frame, func, args, kwargs, out))
        return out


class Omitter(Watching):  # type: ignore[no-untyped-call]
    """Leaves one operation out. A context manager."""

    def __init__(self, file: Path, omission: Omission, known: KnownResults) -> None:
        """Take results that are `known` from there.

        Args:
            file: reference.py, as it was imported.
            omission: What to leave out.
            known: Of an `OmissionRecorder`, for the same inputs.
        """
        super().__init__(file)
        self._omission = omission
        self._known = known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, or leave it out."""
        kwargs = kwargs or {}
        if name_of(func) == self._omission.operation:
            frame = self.frame()
            if frame is not None and _place(frame) == self._omission.call_id:
                return _without(func, args, kwargs, self._omission.how)
        return self._known.run(func, args, kwargs, keep=False)


def name_of(func: Any) -> str:
    """Torch's name of an operation."""
    return str(func.overloadpacket.__name__)


def _stays(func: Any) -> bool:
    return func.is_view or name_of(func) in _STAY


@functools.lru_cache(maxsize=16)
def _positions(code: CodeType) -> tuple[tuple[int | None, ...], ...]:
    """Lines and columns of all instructions: to look for one would take time with each."""
    return tuple(code.co_positions())


def _place(frame: FrameType) -> tuple[str, int, int, str]:
    """Function, line, column and text of what a frame executes now."""
    code = frame.f_code
    line, end_line, column, end_column = _positions(code)[frame.f_lasti // 2]
    line, column = line or frame.f_lineno, column or 0
    # Columns count bytes of UTF-8.
    source = linecache.getline(code.co_filename, line).encode()
    text = source[column : end_column if end_line == line else None].decode(errors="replace")
    text = " ".join(text.split())
    if len(text) > _MOST_TEXT:
        text = text[: _MOST_TEXT - 3] + "..."
    return code.co_name, line, column, text


def omission_at(frame: FrameType, func: Any, how: str) -> Omission:
    """Leaving out an operation that a frame executes now."""
    return Omission(*_place(frame), name_of(func), how)


def omissions_of(
    frame: FrameType, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> list[Omission]:
    """All ways of leaving out an operation that a frame executes now, which gives `out`."""
    first = None if _stays(func) else _first(out)
    if first is None:
        return []
    place = _place(frame)
    return [Omission(*place, name_of(func), how) for how in _ways(func, args, kwargs, first)]


def _first(out: Any) -> torch.Tensor | None:
    """The first tensor that an operation returns."""
    first = next(iter(out), None) if isinstance(out, tuple | list) else out
    return first if isinstance(first, torch.Tensor) else None


def _given(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """An operation's parameters with what they are given, results aside."""
    for i, parameter in enumerate(func._schema.arguments):  # noqa: SLF001 - torch's own way
        value = args[i] if i < len(args) else kwargs.get(parameter.name)
        if not parameter.is_out:
            yield parameter, value


def _ways(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: torch.Tensor
) -> Iterator[str]:
    """Ways of leaving an operation out whose first result is `out`."""
    given = list(_given(func, args, kwargs))
    if not any(v is not None and "Tensor" in str(p.type) for p, v in given):
        return  # it makes constants
    names = [p.name for p, v in given if isinstance(v, torch.Tensor) and _could_be(v, out)]
    changed = [p.name for p, _ in given if is_write(p)]
    names = changed or names  # an operation in place leaves its tensor as it is
    if names:
        yield from map(instead, names)
    elif out.dtype == torch.bool:
        yield from (_TRUE, _FALSE)
    else:
        yield ZEROS
    for parameter, value in given:
        optional = isinstance(value, torch.Tensor) and "Optional" in str(parameter.type)
        if optional or (parameter.name == "is_causal" and value is True):
            yield f"no {parameter.name}"


def instead(name: str) -> str:
    """The way of leaving an operation out that has one of its inputs in its result's place."""
    return f"its {name} instead"


def _could_be(value: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether an input may stand for a result."""
    kinds = [(t.dtype.is_floating_point, t.dtype == torch.bool) for t in (value, out)]
    return value.shape == out.shape and kinds[0] == kinds[1]


def _without(func: Any, args: Sequence[Any], kwargs: dict[str, Any], how: str) -> Any:
    """Result of an operation that is left out."""
    given = {p.name: v for p, v in _given(func, args, kwargs)}
    if how.startswith("no "):
        name = how.removeprefix("no ")
        value = False if name == "is_causal" else None
        names = [p.name for p in func._schema.arguments]  # noqa: SLF001 - torch's own way
        args = [value if n == name else a for n, a in zip(names, args, strict=False)]
        return func(*args, **{k: value if k == name else v for k, v in kwargs.items()})
    operand = given.get(how.removeprefix("its ").removesuffix(" instead"))
    if isinstance(operand, torch.Tensor):
        operand = operand.clone()  # before the operation overwrites it
    out = func(*args, **kwargs)
    first = _first(out)
    assert first is not None, "it had a result when it was recorded"
    if isinstance(operand, torch.Tensor):
        first.copy_(operand.expand_as(first))
    else:
        first.fill_(how == _TRUE)
    return out
