"""The `kagent` command. All printing of the program happens here and in `kagent.display`."""

from kagent.cli import (  # noqa: F401 - they register their commands
    asktell,
    candidates,
    evolve,
    export,
    prompt,
    reading,
    review,
    selftest,
)
from kagent.cli.app import app, main

__all__ = ["app", "main"]
