"""Arguments of the Python interface: a value that does not fit is refused in one line.

A program's mistake is then told as a user's, before anything is made or written.
"""

from __future__ import annotations

import reprlib
from typing import TypeGuard

from kagent_sandbox.errors import UserError


def require(fits: object, name: str, value: object, expected: str) -> None:
    """Make sure that an argument fits.

    Args:
        fits: Whether it does, as a condition has it.
        name: Name of the parameter.
        value: The argument.
        expected: Words for values that fit, and for what to do where that is not plain.

    Raises:
        UserError: It does not.
    """
    if not fits:
        raise UserError(f"{name}={reprlib.repr(value)}: expected {expected}")


def require_flags(**flags: object) -> None:
    """Make sure that arguments are True or False: a text such as "no" would count as True.

    Raises:
        UserError: One is neither.
    """
    for name, value in flags.items():
        require(isinstance(value, bool), name, value, "True or False")


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether a value is a whole number, and not below the least."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
