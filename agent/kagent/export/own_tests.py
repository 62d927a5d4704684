"""A library's own tests: run before it is written, with nobody timing on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kagent_sandbox.cache import cache_folder
from kagent_sandbox.device.table import own_unit
from kagent_sandbox.errors import UserError
from kagent_sandbox.process.device_lock import DeviceLock
from kagent_sandbox.replay.library_tests import Ran, run_tests

from kagent.runs.files import write_file


def run_in_turn(
    name: str, files: Mapping[str, bytes], say: Callable[[str], None], *, gpu: bool, path: str
) -> Ran:
    """Run a library's tests on this machine, in a turn on the device.

    Args:
        name: Of its package.
        files: Of the library, by their paths in it; it need not be on the disk.
        say: Is told who has the device while it is waited for.
        gpu: Whether its tests may use the GPU.
        path: The folder among the files that tests import from.

    Raises:
        ChildDied, ConfinementError: They cannot be run here.
    """
    unit = own_unit("gpu" if gpu else "cpu")
    with DeviceLock(unit, say).turn("work"):
        return run_tests(name, files, gpu=gpu, path=path)


def failure_of(name: str, tested: Ran) -> str:
    """The failure of a library's tests and the file with their output; "" if all pass.

    Raises:
        UserError: The output cannot be kept.
    """
    if not tested.why:
        return ""
    log = cache_folder() / "export" / f"{name}-tests.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        write_file(log, tested.log)
    except OSError as e:
        raise UserError(f"{log}: cannot be written ({e.strerror})") from None
    return f"its own tests do not pass: {tested.why} (their output: {log})"
