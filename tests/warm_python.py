"""Processes of kagent that are forked from one that has imported torch: milliseconds, not seconds.

The agent imports for 0.6 s of CPU time. A judge imports torch, and so do the fork-servers of its
launchers and of builders, and the worker that measures baselines: another eight seconds before the
first verdict. Here a template imports once. What is started are its children: real processes with
their own session, files, environment and command line, confined and killed as ever.

`Popen` is `subprocess.Popen` for all other commands.
"""

import atexit
import collections
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import itertools
import json
import os
import platform
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from pathlib import Path

from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.device.cpu.openmp import WAITING
from kagent_sandbox.process.channel import Channel, ChannelError
from kagent_sandbox.process.huge_pages import gather_pages
from kagent_sandbox.process.zygote import FEW_CHILDREN

PRELOAD = (
    "torch",
    "numpy",
    "triton",
    "torch._refs",
    "torch.fx.experimental.symbolic_shapes",
    "kagent_sandbox.lang",
    "kagent_sandbox.judge.server",
    "kagent_sandbox.device.cpu.backend",
    "kagent_sandbox.device.cpu.baselines",
    "kagent_sandbox.device.cpu.executor",
    "kagent_sandbox.builder.worker",
    "kagent.cli",
    "kagent.evolve.session",
    "brief_timing",
)
"""Nothing of these is changed by being imported, nor by the others."""
EARLY = (
    "CUDA_VISIBLE",
    "FORCE_COLOR",
    "KAGENT_LANGUAGES",
    "NO_COLOR",
    "PYTHONPATH",
    "TORCH",
    "TRITON",
)
"""How environment variables begin that something in `PRELOAD` reads when it is imported."""
LATE = (
    "TORCHDYNAMO_DISABLE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS",
    "TORCHINDUCTOR_VEC_ISA_OK",
    "TRITON_CACHE_DIR",
    "TRITON_DISABLE_LINE_INFO",
)
"""These begin in the same way, and are read later, by what `PRELOAD` leaves out."""
BRIEF = "BRIEF_TIMING"
"""Environment variable of processes in which `brief_timing` is in force."""
MODULES = {
    "kagent": (),
    "kagent.authoring.inductor.worker": (
        "kagent.authoring.inductor.cpp",
        "kagent.authoring.inductor.fake_gpu",
        "kagent.authoring.inductor.trace",
        "kagent.authoring.inductor.triton",
    ),
    "kagent.campaign.worker": (),
    "kagent.suite.worker": (),
    "kagent_sandbox.judge.check.task_checker": (),
    "kagent_sandbox.judge.timing.baseline_worker": (),
}
"""Started by `python -m`, and what their template imports besides."""
SERVERS = ("kagent_sandbox.judge.server import main", "kagent_sandbox.process.zygote import main")
"""In what is started by `python -c`."""
PROGRAM = "# this program may be forked from a template"
"""In a test's own program, started by `python -c`: it imports kagent, and starts no Python."""
WHOLE_PROGRAM = f"{PROGRAM}, and what it starts from the program"
"""The same for a program that starts processes of kagent."""
TEMPLATE_COSTS = 2
"""As many processes that import for themselves take the CPU time of a template's start."""
_START_S = 300.0
_FREE_FD = 200  # descriptors are moved there, out of the way of the numbers that they shall have
_BOOTSTRAP = (
    "import gc, json, sys; gc.disable(); path = list(sys.path); told = json.loads(sys.argv[2]); "
    "sys.path[:] = told['path']; import warm_python; "
    "warm_python.main(int(sys.argv[1]), told['preload'], path)"
)
_ROOM = " " * 8000  # of the command line, in which children write theirs
_MMAP_MAX, _TRIM_THRESHOLD = -4, -1  # mallopt's
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT, _CHILD_SETTID, _CHILD_CLEARTID = 0x8000, 0x01000000, 0x00200000
_GET_TID_ADDRESS = 40

_templates = {}  # by the environment that is read early
_without = collections.Counter()  # processes that could have had a template, in the same way
_wrappers = []  # in a template: functions of torch that would import dynamo


class Popen(subprocess.Popen):
    """As `subprocess.Popen`; a process of kagent is forked from a template."""

    def _execute_child(self, *given):
        asked = _SIGNATURE.bind(self, *given).arguments
        words = asked["args"]
        env = dict(os.environ if asked["env"] is None else asked["env"])
        odd = _CLONE is None or any(asked[k] for k in ("preexec_fn", "shell", "startupinfo"))
        if odd or not _is_ours(words) or not self._shall_fork(env, words):
            super()._execute_child(*given)
            return
        ends = [asked[k] for k in ("p2cread", "c2pwrite", "errwrite")]
        fds = [fd if fd != -1 else std for std, fd in enumerate(ends)]
        passed = list(asked["pass_fds"])
        order = {
            "words": list(map(os.fspath, words)),
            "env": env,
            "at": [0, 1, 2, *passed],
            "cwd": os.path.abspath(asked["cwd"] or "."),
            "session": asked["start_new_session"],
        }
        pid = _template(env, _further(words)).fork(order, [*fds, *passed])
        if pid is None:
            super()._execute_child(*given)
            return
        self.pid = pid
        self._child_created = True
        self._close_pipe_fds(*(asked[k] for k in _PIPES))

    def _shall_fork(self, env, words):
        return True


class LatePopen(Popen):
    """As `Popen` where a template is there, or would have paid by now."""

    def _shall_fork(self, env, words):
        key = _key(env, _further(words))
        if _found(key) is not None or _without[key] >= TEMPLATE_COSTS:
            return True
        _without[key] += 1
        return False


_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def subprocess_module():
    """What takes the place of `subprocess` in a module that starts processes."""
    return types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen})


def ready(*environments):
    """Start the templates for these environments, or for this process's, where there are none."""
    for env in (environments or (os.environ,)) if _CLONE is not None else ():
        _template(env)


def close_all():
    """End the templates. What was forked from them ends when its own client is gone."""
    while _templates:
        _templates.popitem()[1].close()


def _is_ours(words):
    if isinstance(words, str | bytes | os.PathLike) or words[0] != sys.executable:
        return False
    rest = list(words[1:])
    if rest[:1] == ["-m"]:
        return rest[1] in MODULES
    return "-c" in rest[:2] and any(s in rest[rest.index("-c") + 1] for s in (*SERVERS, PROGRAM))


def _further(words):
    return MODULES.get(words[2], ()) if words[1] == "-m" else ()


def _early(env, further):
    late = () if further else LATE  # else torch's compiler is imported, too
    read = {k: v for k, v in env.items() if k.startswith(EARLY) and k not in late}
    # threads of what is not timed, or briefly, sleep while they wait: workers share the cores
    spins = {} if BRIEF in env else {k: env[k] for k in WAITING if k in env}
    return {**dict.fromkeys(WAITING, "0"), **spins, **read}


def _key(env, further):
    return repr((sorted(_early(env, further).items()), sys.path, further))


def _found(key):
    found = _templates.get("nursery") or _templates.get(key)
    return None if found is None or found.gone() else found


def _template(env, further=()):
    key = _key(env, further)
    found = _found(key)
    if found is None:
        found = _templates[key] = _started(_early(env, further), further)
    return found


def _started(early, further):
    ours, theirs = Channel.pair()
    threads = str(cpu_facts().units)
    kept = {k: os.environ[k] for k in ("PATH", "HOME", "VIRTUAL_ENV") if k in os.environ}
    openmp = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    told = json.dumps({"path": sys.path, "preload": [*PRELOAD, *further]})
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, str(theirs.fileno()), told, _ROOM],
            env={**kept, **early, **openmp, "OMP_DYNAMIC": "false", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
    return Template(ours, process)


class Template:
    """The hold on a process that forks: a child of this one, and its children will be, too."""

    def __init__(self, channel, process=None):
        self._channel, self._process, self._lock = channel, process, threading.Lock()

    def gone(self):
        return self._process is not None and self._process.poll() is not None

    def fork(self, order, fds):
        """Return the process id of a child of this process. None where the template has threads,
        which its children would lack.
        """
        with self._lock:
            self._channel.send(order, fds=fds)
            return self._channel.recv(_START_S).obj["pid"]

    def close(self):
        self._channel.close()
        if self._process is not None:
            self._process.wait()


# -- in the template -------------------------------------------------------------------------------


def main(fd, preload, path):
    """Import, then fork until the client is gone. `path` is as Python itself sets it."""
    for name in preload:
        importlib.import_module(name)
    torch = sys.modules["torch"]
    sys.modules["brief_timing"].keep_caches()
    sys.modules["brief_timing"].repeat_less()
    # what it is told is in no command line: tests look for processes by theirs
    _write_command_line([sys.executable, "-m", "warm_python"])
    sys.path[:] = path
    gc.collect()
    code = torch._compile._disable_dynamo(len).__code__
    functions = (o for o in gc.get_objects() if type(o) is types.FunctionType)
    _wrappers.extend(f for f in functions if f.__code__ is code)
    gc.freeze()
    gc.enable()
    _serve(Channel(socket.socket(fileno=fd)))


def _serve(channel):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is the client's
    for number in itertools.count():
        try:
            message = channel.recv(None, max_fds=64)
        except ChannelError:
            os._exit(0)
        if number == FEW_CHILDREN:
            gather_pages()
        alone = len(os.listdir("/proc/self/task")) == 1
        pid = _fork_sibling() if alone else None
        if pid == 0:
            channel.close()
            _become(message.obj, list(message.fds))
        for fd in message.fds:
            os.close(fd)
        channel.send({"pid": pid})


def _fork_sibling():
    """Fork a child of this process's parent, which then waits for it as for any child."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    # where libc keeps the number of its thread, which it writes anew when it forks itself
    address = ctypes.c_void_p()
    flags = _CLONE_PARENT | signal.SIGCHLD
    if libc.prctl(_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) == 0:
        flags |= _CHILD_SETTID | _CHILD_CLEARTID
    # the thread's number is the fourth on one machine, and the fifth on the other
    here, nothing = ctypes.c_void_p(address.value), ctypes.c_void_p(0)
    last = (here, nothing) if platform.machine() == "x86_64" else (nothing, here)
    python.PyOS_BeforeFork()
    pid = libc.syscall(ctypes.c_long(_CLONE), ctypes.c_ulong(flags), nothing, nothing, *last)
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


def _become(order, fds):
    """Run a command as a new interpreter would. Never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["session"]:
        os.setsid()
    os.chdir(order["cwd"])
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FREE_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, at in zip(moved, order["at"], strict=True):
        os.dup2(fd, at, inheritable=True)
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None
    random.seed()
    if BRIEF in order["env"]:
        sys.modules["brief_timing"].apply()
    words = order["words"]
    if any(SERVERS[1] in word for word in words):  # it starts no further Python
        _show_functions_of_dynamo()
    elif any(WHOLE_PROGRAM in w for w in words) or not any(PROGRAM in w for w in words):
        _fork_from_here()
    _keep_memory(order["env"])
    _write_command_line(words)
    code = 1
    try:
        _run(words[1:])
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if not isinstance(e.code, int | None):
            sys.stderr.write(f"{e.code}\n")
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _run(words):
    scope = vars(sys.modules["__main__"])
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])
        return
    at = words.index("-c")
    sys.argv[:] = words[at:]
    sys.argv.pop(1)
    exec(compile(words[at + 1], "<string>", "exec"), scope)


def _keep_memory(env):
    """Have malloc do what it reads of the environment when a process begins."""
    libc = ctypes.CDLL(None)
    for name, option in (
        ("MALLOC_MMAP_MAX_", _MMAP_MAX),
        ("MALLOC_TRIM_THRESHOLD_", _TRIM_THRESHOLD),
    ):
        if name in env:
            libc.mallopt(option, min(int(env[name]), 2**31 - 1))


def _write_command_line(words):
    """Write a command line over this process's, for who looks for processes by theirs."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(map(os.fsencode, words))[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, text, len(text))


def _show_functions_of_dynamo():
    """Show a collection's view of these, which the builder's server looks for among all objects.

    Thawing all instead would have it copy, and walk, the template's whole heap.
    """
    thawed = gc.get_objects
    gc.get_objects = lambda: [*_wrappers, *thawed()]


def _fork_from_here():
    """Have what this process starts be forked from it as it is now, too."""
    ours, theirs = Channel.pair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nothing, fd)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != theirs.fileno():
                with contextlib.suppress(OSError):
                    os.close(int(name))
        _serve(Channel(theirs))
    theirs.close()
    _templates.clear()
    _templates["nursery"] = Template(ours)
    subprocess.Popen = Popen
