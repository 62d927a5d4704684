"""A task's reference.py: the functions that it defines, and its import."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from kagent_sandbox.errors import TaskError
from kagent_sandbox.importing import import_file

if TYPE_CHECKING:
    import torch

    from kagent_sandbox.data.case import Case


class Reference(Protocol):
    """Functions that a task's reference.py defines.

    Tensors of `inputs` are named like the task's tensor arguments; all functions take the arguments
    of the entry function by keyword (tensors and scalars) and return a tensor or a tuple of them.
    Where the task has arguments that are written, `reference` returns their new values after the
    results; `eager` and experts write them, as torch does, and return the results alone.
    """

    def inputs(
        self, case: Case, generator: torch.Generator, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Fresh tensors of the case's distribution, by argument name, on `device`."""

    def reference(self, **arguments: object) -> object:
        """The result in float64 (float32 where memory forbids), from inputs in their own dtype."""

    def eager(self, **arguments: object) -> object:
        """Torch's own implementation in the inputs' dtype: baseline and yardstick of rounding. It
        gets arguments of its own to write.
        """

    def experts(self) -> Mapping[str, Callable[..., object]]:
        """Expert libraries that can be imported here, by name: further baselines. May be empty."""

    def accept(self, results: object, expected: object, **arguments: object) -> object:
        """Elements at which another value than the reference's is as right; only of tasks that
        declare `accept = true`. Per result True, False, or a mask of its shape.
        """


def load_reference(path: Path) -> Reference:
    """Import a trusted reference.py from its path.

    Raises:
        TaskError: It cannot be imported or lacks a function.
    """
    try:
        module = import_file(path, f"kagent_reference_{path.parent.name}")
    except (Exception, SystemExit) as e:  # noqa: BLE001 - whatever a user's module raises becomes one clear line
        raise TaskError(f"{path}: {type(e).__name__}: {e}") from None
    missing = [n for n in ("inputs", "reference", "eager", "experts") if not hasattr(module, n)]
    if missing:
        raise TaskError(f"{path}: does not define {', '.join(missing)}; see docs/tasks.md")
    return cast("Reference", module)
