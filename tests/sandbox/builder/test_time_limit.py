"""Limits of compiles: CPU time of this process and of compilers that it starts, not wall time."""

import resource
import subprocess
import sys
import time

import pytest
from kagent_sandbox.builder.compile.time_limit import compile_limit
from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.data.verdict import Status

BURN = "while True: pass"


def test_waiting_is_not_compiling():
    """A compiler that gets no core, on a busy machine, is not refused."""
    with compile_limit("k", 0.2):
        time.sleep(0.6)


def test_time_in_this_process_counts():
    before = resource.getrlimit(resource.RLIMIT_CPU)
    with pytest.raises(BuildRejected, match=r"kernel k took longer than 0\.1 s of CPU") as caught:
        burn()
    assert caught.value.status is Status.TIMEOUT
    assert resource.getrlimit(resource.RLIMIT_CPU) == before


def burn():
    with compile_limit("k", 0.1):
        while True:
            pass


def test_a_compiler_of_its_own_process_is_ended_and_the_kernel_is_named():
    """In a fresh process, whose own clock stands near 0 as a builder's does."""
    code = (
        "import atexit, resource, subprocess, sys\n"
        "used = lambda: resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime\n"
        "atexit.register(lambda: print(used()))\n"
        "from kagent_sandbox.builder.compile.time_limit import compile_limit\n"
        "with compile_limit('rows', 1.0):\n"
        f"    subprocess.run([sys.executable, '-c', {BURN!r}], check=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "kernel rows took longer than 1 s of CPU time" in done.stderr
    assert float(done.stdout) < 1.5  # whatever this process itself has used


def test_a_compiler_that_wraps_the_end_of_its_time_has_run_out_of_it(monkeypatch):
    """Triton tells what is raised in it as a mistake in the source. The timer may be early by a
    tick of the clock.
    """
    monkeypatch.setattr("kagent_sandbox.builder.compile.time_limit._used_s", lambda: 0.0)

    def wrapped():
        try:
            while True:
                pass
        except BuildRejected as e:
            raise SyntaxError("line 16") from e

    with pytest.raises(BuildRejected, match="kernel k took longer"), compile_limit("k", 0.1):
        wrapped()


def test_another_error_stays_what_it_is():
    with pytest.raises(ValueError, match="no"), compile_limit("k", 60.0):
        raise ValueError("no")
