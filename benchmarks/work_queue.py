"""Ctrl-C in a script that has queued work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor


@contextlib.contextmanager
def cancelled_on_interrupt(pool: Executor) -> Iterator[None]:
    """Begin nothing more of what waits in a pool when Ctrl-C comes. The pool is left then.

    Raises:
        SystemExit: Ctrl-C came; the text says that the figures are not whole.
    """
    try:
        yield
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        raise SystemExit("interrupted: what waited was not begun, and no table is made") from None
