"""The confined side of `library_tests`: writes a library's files, and runs pytest on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from types import ModuleType
from typing import Any, cast

import pytest
import torch

from kagent_sandbox.process.context import Context
from kagent_sandbox.replay import triton as replay_triton

_MAX_LIBRARY_BYTES = 1 << 30
_OPTIONS = ("-v", "-ra", "--maxfail=3", "-p", "no:cacheprovider", "--color=no")
_OURS = ("kagent", "kagent_sandbox")


def handle(context: Context) -> None:
    """Handler of the fork-server: one library."""
    message = context.channel.recv(60.0, max_bytes=_MAX_LIBRARY_BYTES)
    asked = cast("dict[str, Any]", message.obj)
    if asked["gpu"]:
        _make_context()
    context.lock()
    folder = context.tmp / str(asked["name"])
    for path, data in zip(asked["paths"], message.blobs, strict=True):
        parts = PurePosixPath(path).parts
        if ".." in parts or path.startswith("/"):
            raise ValueError(f"{path}: leaves the library")
        target = folder.joinpath(*parts)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    results = _Results()
    # This library, even where another version of it is installed.
    sys.path.insert(0, str(folder / asked["path"]))
    os.chdir(folder)
    with _without_kagent():
        options = (*_OPTIONS, f"--rootdir={folder}")
        code = pytest.main([*options, "."], plugins=[results])
    if code != pytest.ExitCode.OK and not results.failed:
        results.failed.append(f"pytest (it ended with {code!r})")
    context.channel.send({"passed": results.passed, "failed": results.failed})


class _Results:
    """Counts what pytest reports."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test is over."""
        self.passed += report.when == "call" and report.passed
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        """A file was imported, or could not be."""
        if report.failed:
            self.failed.append(report.nodeid)


def _make_context() -> None:
    """Have torch and Triton find the GPU while the driver's files can be read."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        a = torch.ones(64, 64, dtype=dtype, device="cuda")
        torch.mm(a, a)
    torch.cuda.synchronize()
    replay_triton.warm_up()


@contextmanager
def _without_kagent() -> Iterator[None]:
    """A library that imports kagent fails, as it would where that is not installed."""
    ours = {n: m for n, m in sys.modules.items() if n.partition(".")[0] in _OURS}
    for name in ours:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(_OURS, cast("ModuleType", None)))
    try:
        yield
    finally:
        sys.modules.update(ours)
