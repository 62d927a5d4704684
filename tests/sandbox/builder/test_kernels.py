"""Kernels of one candidate that several forks need."""

import os
import shutil
import subprocess
import sys

SOURCE = 'extern "C" void twice(float* x, long n) { for (long i = 0; i < n; ++i) x[i] *= 2; }'
COMPILE = """
import sys
from pathlib import Path
from kagent_sandbox.builder.compile import kernels
kernels.cache_folder = Path(sys.argv[1])
print(kernels.compiled(kernels.Source("cpp", "twice", sys.argv[2]), "cpu").info.hash)
"""


def test_forks_that_need_a_kernel_at_the_same_time_compile_it_once(tmp_path):
    tools, cache = tmp_path / "tools", tmp_path / "cache"
    tools.mkdir()
    cache.mkdir()
    counting = tools / "g++"
    counting.write_text(
        f'#!/bin/sh\necho x >> "{tmp_path}/calls"\nexec "{shutil.which("g++")}" "$@"\n'
    )
    counting.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", COMPILE, str(cache), SOURCE]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    hashes = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(hashes) == 1
    assert (tmp_path / "calls").read_text().count("x") == 1
