"""Evolve GPU kernels and keep only the speed-ups that can be proved.

`kagent.Run` lets a program ask for prompts and tell answers; docs/agents.md shows how.
`kagent.Task.of` makes a task of a PyTorch function or module; docs/tasks.md shows how. Names are
loaded when they are used, so that the command line starts quickly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kagent_sandbox.errors import KagentError

    from kagent.api import Best, OpenAsk, Result, Run, Task

__all__ = ["Best", "KagentError", "OpenAsk", "Result", "Run", "Task"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "KagentError":
        from kagent_sandbox import errors

        return errors.KagentError
    from kagent import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return __all__
