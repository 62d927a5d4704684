"""Standard error that nobody can read any more."""

import contextlib
import os
import sys

import pytest
from kagent.cli.app import err
from kagent.ui.terminal import STDERR
from rich.live import Live


def opened(kind):
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.fixture(params=["full", "gone", "closed"])
def unreadable(request, monkeypatch):
    stream = os.fdopen(opened(request.param), "w", buffering=1)
    if request.param == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    yield stream
    with contextlib.suppress(OSError):
        stream.close()


def test_what_cannot_be_written_ends_nothing(unreadable):
    with pytest.raises((OSError, ValueError)):
        unreadable.write("a line\n")
    for _ in range(3):
        err.print("a line of progress\n")
    STDERR.flush()


def test_it_is_the_standard_error_of_the_time(capsys):
    err.print("one line")
    with Live(console=err, auto_refresh=False):
        sys.stderr.write("another one\n")
        err.print("the last")
    assert capsys.readouterr().err.split() == ["one", "line", "another", "one", "the", "last"]
