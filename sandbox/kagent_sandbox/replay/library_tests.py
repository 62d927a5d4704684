"""Runs the tests that an exported library brings, on files that are not on the disk yet.

As its users would run them, but confined: kernels are a stranger's code. The process gets the
library's files and writes them into its private folder, so that nothing of a library that fails is
anywhere else. What it answers comes from a process in which the kernels ran: host code that knows
where it is can have its tests pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.confine.presets import gpu_launcher_confinement, package_folders
from kagent_sandbox.process.channel import ChannelError
from kagent_sandbox.process.forkserver import ForkServer
from kagent_sandbox.runtime.text import printable

LIMIT_S = 1800.0
"""Seconds for all tests. Two operators take half a minute on two cores, most of it in
torch.compile.
"""
_MAX_ANSWER_BYTES = 1 << 20
_PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments")
"""Packages that pytest imports, some of them only when tests run: perhaps not where torch is."""


@dataclass(frozen=True)
class Ran:
    """The outcome of a library's tests."""

    passed: int
    failed: tuple[str, ...]  # tests, and files that could not be imported
    log: str  # the end of what was printed
    ended: str = ""  # end of the process, if it came before the tests were over

    @property
    def why(self) -> str:
        """Describe the failure in words; "" if there is none."""
        if self.ended:
            return f"their process {self.ended}"
        if self.failed:
            more = f" and {len(self.failed) - 1} more" if len(self.failed) > 1 else ""
            return f"{self.failed[0]}{more} failed"
        return "" if self.passed else "there was none to run"


def run_tests(name: str, files: Mapping[str, bytes], *, gpu: bool, path: str) -> Ran:
    """Run the tests of a library, `test_*.py`.

    Args:
        name: Of its package.
        files: Of the library, by their paths.
        gpu: Whether they may use the GPU; without it they find none.
        path: The folder among the files that they import from: "" is where the files are.

    Raises:
        ChildDied: The process cannot be started: pytest is missing, for example.
        ConfinementError: This host cannot confine it.
    """
    confinement = dataclasses.replace(builder_confinement(), cpu_s=2 * int(LIMIT_S))
    if gpu:  # Triton and torch.compile run compilers
        confinement = dataclasses.replace(gpu_launcher_confinement(), execute=True)
    read = (*confinement.read, *package_folders(*_PYTEST))
    confinement = dataclasses.replace(confinement, read=read)
    server = ForkServer(
        "kagent_sandbox.replay.library_tests_worker:handle",
        preload=("torch", "numpy", "pytest", *(("triton",) if gpu else ())),
        confinement=confinement,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"},
    )
    with server, server.spawn(wall_limit_s=LIMIT_S, lock_first=not gpu) as child:
        answer: object = None
        try:
            child.channel.send(
                {"name": name, "paths": [*files], "gpu": gpu, "path": path}, [*files.values()]
            )
            answer = child.channel.recv(LIMIT_S + 10.0, max_bytes=_MAX_ANSWER_BYTES).obj
        except ChannelError:
            pass  # the end of the process says more
        end = (child.wait(10.0) if answer is not None else child.wait(2.0)) or child.kill()
    match answer:
        case {"passed": int(passed), "failed": list(failed)}:
            named = tuple(printable(str(f))[:200] for f in failed)
            return Ran(passed, named, end.log_tail)
    return Ran(0, (), end.log_tail, end.describe())
