"""The `kagent` command. All printing of the program happens here and in `kagent.ui`."""

from kagent.cli import (  # noqa: F401 - they register their commands
    asktell,
    candidates,
    evolve,
    export,
    prompt,
    review,
    runs,
    selftest,
)
from kagent.cli.app import app, main

__all__ = ["app", "main"]
