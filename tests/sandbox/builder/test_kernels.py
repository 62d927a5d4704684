"""Kernels of one candidate that several forks need."""

import json
import os
import shutil
import subprocess
import sys

import pytest

SOURCE = 'extern "C" void twice(float* x, long n) { for (long i = 0; i < n; ++i) x[i] *= 2; }'
ENDLESS = """
constexpr long count(long n) { return n < 2 ? 1 : count(n - 1) + count(n - 2); }
constexpr long much = count(60);
"""
SOURCES = {
    "right": (SOURCE, 20.0),
    "wrong": (SOURCE.replace("x[i]", "y[i]"), 20.0),
    "endless": (ENDLESS + SOURCE, 1.0),
}
"""Sources, and the limit in seconds."""
COMPILE = """
import json, os, sys
from pathlib import Path
from kagent_sandbox.builder.compile import kernels
from kagent_sandbox.builder.policy import BuildRejected
from kagent_sandbox.runtime.errors import CompileError

def child(folder, source, limit_s):
    os.environ["CALLS"] = str(folder / "calls")
    kernels.cache_folder = folder
    try:
        return kernels.compiled(kernels.Source("cpp", "twice", source), "cpu", limit_s).info.hash
    except (BuildRejected, CompileError) as e:
        return f"{type(e).__name__} {e}"

for name, (source, limit_s) in json.loads(sys.argv[2]).items():
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    for i in range(2):
        if os.fork() == 0:
            (folder / f"{i}.said").write_text(child(folder, source, limit_s))
            os._exit(0)
    assert [os.wait()[1] for _ in range(2)] == [0, 0]
"""


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """What two forks say that need the same kernel at the same time, and how often it is compiled:
    by the source's name.
    """
    base = tmp_path_factory.mktemp("kernels")
    counting = base / "g++"
    counting.write_text(f'#!/bin/sh\necho x >> "$CALLS"\nexec "{shutil.which("g++")}" "$@"\n')
    counting.chmod(0o755)
    environment = {**os.environ, "PATH": f"{base}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", COMPILE, str(base), json.dumps(SOURCES)]
    subprocess.run(command, env=environment, check=True)

    def found(name):
        folder = base / name
        said = [(folder / f"{i}.said").read_text() for i in range(2)]
        return said, (folder / "calls").read_text().count("x")

    return found


@pytest.mark.nightly
def test_forks_that_need_a_kernel_at_the_same_time_compile_it_once(both):
    hashes, compiles = both("right")
    assert hashes[0] == hashes[1]
    assert " " not in hashes[0]
    assert compiles == 1


def test_what_one_fork_was_refused_is_not_compiled_by_another(both):
    said, compiles = both("wrong")
    assert said[0] == said[1]
    assert said[0].startswith("CompileError kernel twice: line 1: ")
    assert "'y' was not declared" in said[0]
    assert compiles == 1


def test_nor_is_what_took_too_long(both):
    said, compiles = both("endless")
    assert said[0] == said[1]
    assert said[0].startswith("BuildRejected compiling kernel twice took longer than 1 s of CPU")
    assert compiles == 1
