"""Processes of Python that are forked from one that has imported torch: milliseconds, not seconds.

A judge imports torch, and so does the fork-server of its launchers: four seconds of CPU time before
the first verdict. Here a template imports once; the processes are its children, real and confined
as ever.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types

from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.device.cpu.openmp import WAITING
from kagent_sandbox.process import forkserver
from kagent_sandbox.process.channel import Channel, ChannelError

PRELOAD = (
    "torch",
    "numpy",
    "kagent_sandbox.judge.server",
    "kagent_sandbox.device.cpu.backend",
    "kagent_sandbox.device.cpu.executor",
)
READ_LATE = frozenset(
    {"HOME", "KAGENT_ISOLATION", "KAGENT_LOCKS", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"}
    | {"XDG_CACHE_HOME"}
)
"""Environment variables that nothing in `PRELOAD` reads when it is imported."""
_START_S = 300.0
_FREE_FD = 200  # descriptors are moved there, out of the way of the numbers that they shall have
_BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); import gc; gc.disable(); "
    "import warm_python; warm_python.main(int(sys.argv[1]))"
)

_templates = {}  # by the environment that is read early


def subprocess_module():
    """What takes the place of `subprocess` in the module that starts judges."""

    def popen(command, *, env, **options):
        early = {k: v for k, v in env.items() if k not in READ_LATE}
        key = repr((sorted(early.items()), sys.path))
        template = _templates.get(key)
        if template is None or template.gone():
            template = _templates[key] = _started(early)
        return template.popen(command, env=env, **options)

    return _with(popen)


def close_all():
    """End the templates. What was forked from them ends when its own client is gone."""
    while _templates:
        _templates.popitem()[1].close()


def _with(popen):
    return types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def _started(env):
    ours, theirs = Channel.pair()
    threads = str(cpu_facts().units)
    env = {**env, **WAITING, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), json.dumps(sys.path)],
            env={**env, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return Template(ours, process)


class Template:
    """The hold on a process that forks. `popen` is as `subprocess.Popen`, as far as it is used."""

    def __init__(self, channel, process=None):
        self._channel, self._process = channel, process

    def gone(self):
        return self._process is not None and self._process.poll() is not None

    def popen(self, command, *, stdin, stdout, stderr, env, pass_fds, start_new_session):
        assert stdin is subprocess.DEVNULL
        assert start_new_session
        code = command[command.index("-c") + 1 :]
        read, write = os.pipe()
        with open(os.devnull, "rb") as nothing:
            at = [0, 1, 2, *pass_fds]
            fds = [nothing.fileno(), stdout.fileno(), stderr.fileno(), *pass_fds]
            asked = {"code": code, "env": env, "at": at, "cwd": os.getcwd()}
            self._channel.send(asked, fds=[write, *fds])
        os.close(write)
        answer = self._channel.recv(_START_S).obj
        return WarmProcess(answer["pid"], read)

    def close(self):
        self._channel.close()
        if self._process is not None:
            self._process.wait()


class WarmProcess:
    """A process that a template has forked; it tells the status by a pipe."""

    def __init__(self, pid, status):
        self.pid, self.returncode = pid, None
        self._status = open(status, "rb", buffering=0)  # noqa: SIM115 - closed with the status

    def poll(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._status, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1e3):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            text = self._status.read()  # nothing: the template was killed, and this with it
            self._status.close()
            self.returncode = int(text) if text else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


# -- in the template -------------------------------------------------------------------------------


def main(fd):
    """Import, then fork until the client is gone."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    _serve(Channel(socket.socket(fileno=fd)))


def _serve(channel):
    """Fork when asked. A child that ends is told of at once."""
    wake, woken = os.pipe()
    for end in (wake, woken):
        os.set_blocking(end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    children = {}
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(wake, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if wake in ready:
            os.read(wake, 4096)
            _bury(children)
        if channel.fileno() not in ready:
            continue
        try:
            message = channel.recv(_START_S, max_fds=64)
        except ChannelError:
            os._exit(0)
        status, *fds = message.fds
        pid = os.fork()
        if pid == 0:
            channel.close()
            for fd in (status, wake, woken, *children.values()):
                os.close(fd)
            _become(message.obj, fds)
        for fd in fds:
            os.close(fd)
        children[pid] = status
        channel.send({"pid": pid})


def _bury(children):
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            fd = children.pop(pid)
            os.write(fd, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(fd)


def _become(asked, fds):
    """Run code as `python -c` would. Never returns."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setsid()
    os.chdir(asked["cwd"])
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, at in zip(moved, asked["at"], strict=True):
        os.dup2(fd, at, inheritable=True)
        os.close(fd)
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    random.seed()
    code, *arguments = asked["code"]
    sys.argv[:] = ["-c", *arguments]
    try:
        if "judge.server" in code:
            _fork_from_here()
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _fork_from_here():
    """Have the fork-servers that this process starts be forked from it as it is now, too."""
    ours, theirs = Channel.pair()
    if os.fork() == 0:
        ours.close()
        keep = {0, 1, 2, theirs.fileno()}
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in keep:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        _serve(Channel(theirs))
    theirs.close()
    forkserver.subprocess = _with(Template(ours).popen)
