"""Transport between a client and its judge: a process here, or one elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol


class Link(Protocol):
    """Reaches one judge. When the judge is gone, it is of no more use."""

    @property
    def pid(self) -> int:
        """Process id of the judge, on its machine."""

    def ask(
        self,
        verb: str,
        request: Mapping[str, object],
        blobs: Sequence[bytes],
        on_progress: Callable[[str], None] | None,
    ) -> object:
        """Return the judge's answer to a request.

        Args:
            verb: What `kagent_sandbox.judge.server` is asked to do.
            request: Its arguments, as JSON.
            blobs: Plans and binaries.
            on_progress: Receives the lines that the judge says meanwhile.

        Raises:
            ChildDied: The judge is gone.
            KagentError: What the judge answered.
        """

    def close(self) -> None:
        """End the judge, with all that it started."""
