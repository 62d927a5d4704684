"""The command line, run in this process."""

import functools
import signal
import sys
from dataclasses import dataclass

import typer.main
from kagent.cli import main

_command = functools.cache(typer.main.get_command)  # it takes 0.06 s of CPU time


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def run(monkeypatch, capsys, *words):
    """`kagent WORDS...` in this process; what is not a clean exit fails the test."""
    monkeypatch.setattr(sys, "argv", ["kagent", *map(str, words)])
    monkeypatch.setattr(typer.main, "get_command", _command)
    code = 0
    handler = signal.getsignal(signal.SIGINT)
    try:
        main()
    except SystemExit as e:
        code = e.code or 0
    finally:
        signal.signal(signal.SIGINT, handler)
    printed = capsys.readouterr()
    return Ended(code, printed.out, printed.err)
