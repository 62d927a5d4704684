"""What cannot become a task as it is asked for."""

from __future__ import annotations

from kagent_sandbox.errors import UserError


class AuthoringError(UserError):
    """An operation, or sizes of it, that cannot become a task; the text says why."""
