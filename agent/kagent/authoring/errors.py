"""Errors of code that cannot become a task."""

from __future__ import annotations

from kagent_sandbox.errors import UserError


class AuthoringError(UserError):
    """An operation, or sizes of it, that cannot become a task; the text says why."""
