"""Python processes that know torch and nothing of kagent, forked from one that has imported it:
each is 2 s of CPU time less.

They are as new ones in all that is asked of them: their own folder, environment, path, arguments
and output.
"""

import contextlib
import json
import os
import subprocess
import tempfile

_SERVER = r"""
import atexit, gc, importlib, json, os, runpy, sys, threading, traceback

gc.disable()
import torch

assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
path = [p for p in sys.path if p]
gc.freeze()  # no collection of a fork's walks, and copies, all of torch
gc.enable()


def begin(order):
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(order[name], os.O_WRONLY), fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    words = order["words"]
    if words[0] == "-B":
        sys.dont_write_bytecode = True
        del words[0]
    importlib.invalidate_caches()
    first = {"-c": "", "-m": os.getcwd()}.get(words[0], os.path.dirname(os.path.abspath(words[0])))
    sys.path[:] = [first, *filter(None, order["env"].get("PYTHONPATH", "").split(":")), *path]
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    elif words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = words
        runpy.run_path(words[0], run_name="__main__")


def end(order):
    code = 1
    try:
        begin(order)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if not isinstance(e.code, int | None):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


for line in sys.stdin:
    if (pid := os.fork()) == 0:
        end(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class BarePython:
    """Starts processes one after the other; a context manager."""

    def __init__(self, python):
        ours = ("PYTHONPATH", "PYTHONHOME")
        env = {k: v for k, v in os.environ.items() if k not in ours}
        self._server = subprocess.Popen(
            [str(python), "-c", _SERVER],
            env={**env, "OPENBLAS_NUM_THREADS": "1"},  # others would start when NumPy is imported
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.communicate()

    def run(self, *words, cwd, env):
        """What `subprocess.run` returns of `python *words`, with its output as text."""
        with contextlib.ExitStack() as stack:
            out, err = (stack.enter_context(tempfile.NamedTemporaryFile("r")) for _ in range(2))
            given = list(map(str, words))
            order = {"words": given, "cwd": str(cwd), "env": env, "out": out.name, "err": err.name}
            self._server.stdin.write(json.dumps(order) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(given, code, out.read(), err.read())
