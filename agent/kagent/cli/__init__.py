"""The `kagent` command. All printing of the program happens here and in `kagent.display`."""

from kagent.cli import candidates, evolve, prompt, reading  # noqa: F401 - they register their commands
from kagent.cli.app import app, main

__all__ = ["app", "main"]
