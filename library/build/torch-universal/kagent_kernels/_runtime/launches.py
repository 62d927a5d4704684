"""Launches of kernels, and their watchers."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from .arguments import Value
    from .source import Source

Size: TypeAlias = int | Sequence[int]


@dataclass(frozen=True, slots=True)
class Launching:
    """Parameters of a launch. `shared` is dynamic, in bytes; `grid` counts blocks."""

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    cluster: tuple[int, int, int] | None = None
    cooperative: bool = False
    pdl: bool = False

    @classmethod
    def of(
        cls,
        grid: Size,
        block: Size,
        shared: int,
        cluster: Size | None,
        cooperative: bool,
        pdl: bool,
    ) -> Launching:
        """Make a launch of a user's values.

        Raises:
            ValueError: A size is not positive.
            TypeError: A size is no integer.
        """
        return cls(
            _sizes(grid, "grid"),
            _sizes(block, "block"),
            operator.index(shared),
            None if cluster is None else _sizes(cluster, "cluster"),
            cooperative,
            pdl,
        )


def _sizes(value: Size, what: str) -> tuple[int, int, int]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    sizes = [operator.index(v) for v in values]
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise ValueError(f"{what}={value!r}: expected one to three positive sizes")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


@dataclass(frozen=True, slots=True)
class Observed:
    """One launch, shown just before it is done."""

    source: Source
    target: str  # "cpu", "sm_90a"
    binary: bytes  # a shared object, or a cubin
    symbol: str  # of the kernel in it
    arguments: tuple[Value, ...]
    launching: Launching


Observer = Callable[[Observed], None]
Instead = Callable[["Source", Sequence[object], Launching], bool]
"""Takes a launch in place of the device, and says whether it did: while a candidate is built."""


class LaunchWatcher:
    """Watchers that see launches before the device does. Every launch looks at `any`."""

    any = False
    observer: Observer | None = None
    instead: Instead | None = None

    def took(self, source: Source, args: Sequence[object], launching: Launching) -> bool:
        """Whether a launch is done, in place of the device."""
        instead = self.instead  # read once: other threads may put another one there
        return instead is not None and instead(source, args, launching)


watch = LaunchWatcher()


def launch_instead(instead: Instead) -> None:
    """Show every launch in this process to `instead` first, from now on."""
    watch.instead = instead
    watch.any = True


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Show every launch of this process to `observer`, then do it. Not to be nested."""
    watch.observer, watch.any = observer, True
    try:
        yield
    finally:
        watch.observer, watch.any = None, watch.instead is not None
