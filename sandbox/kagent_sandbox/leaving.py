"""Ending a helper process that has imported torch."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def leave() -> NoReturn:
    """End this process without taking the interpreter apart: with torch in it that takes 0.7 s, for
    which whoever started it waits.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - what libraries want done before the end
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
