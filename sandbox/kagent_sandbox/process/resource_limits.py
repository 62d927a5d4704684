"""The limits of one child's subtree that somebody has to look at, and which of them is exceeded."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kagent_sandbox.confine.namespaces import DISK_SLACK_BYTES
from kagent_sandbox.confine.policy import Confinement, Tier
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.resource_usage import MOST_MAPPINGS, disk_use, memory_bytes


class SubtreeLimits:
    """Looks at what the kernel does not limit per subtree, under the tier that there is."""

    def __init__(self, limits: Confinement, tier: Tier, folder: Path, given_bytes: int) -> None:
        """Begin.

        Args:
            limits: Of the child.
            tier: That it is confined by.
            folder: Its private one, as the host sees it.
            given_bytes: Shared memory that it is given, which is not its own.
        """
        self.peak_bytes = 0
        self._limits = limits
        self._tier = tier
        self._folder = folder
        self._given_bytes = given_bytes

    @property
    def group_bytes(self) -> int:
        """Memory of a control group for it: also what is put in the private folder, and the shared
        memory, which counts as the first toucher's.
        """
        disk = self._limits.disk_bytes + DISK_SLACK_BYTES
        return self._limits.memory_bytes + disk + self._given_bytes

    @property
    def memory_reason(self) -> str:
        """Return the message for exceeded memory."""
        return f"memory limit of {self._limits.memory_bytes >> 20} MiB"

    def exceeded(self, child: int, pids: list[int], printed_bytes: int) -> str | None:
        """The limit that is exceeded, if any.

        Args:
            child: Process of the child itself.
            pids: All processes of the subtree.
            printed_bytes: What they have printed.
        """
        limits = self._limits
        used = memory_bytes(pids, self._given_bytes)
        self.peak_bytes = max(self.peak_bytes, used)
        ours = 1 if self._tier >= Tier.T2 else 0  # the namespace's process 1
        if process_tree.tasks(pids) > limits.processes + ours:
            return f"limit of {limits.processes} processes"
        if used > limits.memory_bytes:
            return self.memory_reason
        disk, files, mappings = self._disk_use(child, pids)
        if disk > limits.disk_bytes:
            return f"disk limit of {limits.disk_bytes >> 20} MiB"
        if files > limits.disk_files:
            return f"limit of {limits.disk_files} files"
        if mappings > MOST_MAPPINGS:
            return f"limit of {MOST_MAPPINGS} mappings"
        if process_tree.open_files(pids) > limits.open_files:
            return f"limit of {limits.open_files} open files"
        if printed_bytes > limits.output_bytes:
            return f"output limit of {limits.output_bytes >> 20} MiB"
        return None

    def _disk_use(self, child: int, pids: list[int]) -> tuple[int, int, int]:
        """Bytes and number of files in the private folder; below T2, where those without a name
        have to be looked for, the number of the processes' mappings, too.
        """
        if self._tier < Tier.T2:
            return disk_use(self._folder, pids, self._limits.disk_files)
        path = f"/proc/{child}/root{self._folder}"
        with contextlib.suppress(OSError):
            if os.stat(path).st_dev == os.stat(self._folder).st_dev:
                return 0, 0, 0  # the child has not made its own file system yet
            found = os.statvfs(path)
            used = (found.f_blocks - found.f_bfree) * found.f_frsize
            return used, found.f_files - found.f_ffree, 0
        return 0, 0, 0
