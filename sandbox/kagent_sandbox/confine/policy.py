"""Rights of a confined process, and the steps that confine it.

The steps run in the process itself, in this order: `namespaces` and `cgroup` right after the fork
(from tier T2, T3), `enter` (limits, another user), `lock` before the first untrusted byte is looked
at (Landlock, seccomp). All of them only ever take away.
"""

from __future__ import annotations

import os
import resource
import stat
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kagent_sandbox.confine import landlock, seccomp
from kagent_sandbox.confine.libc import prctl
from kagent_sandbox.confine.users import become, drop_capabilities
from kagent_sandbox.errors import UserError

_SELF_PROC = ("cpuinfo", "meminfo", "stat", "version", "filesystems", "loadavg", "self")
_SYSTEM_FILES = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/sys/devices/system",
    "/sys/kernel/mm/transparent_hugepage",
    "/proc/sys/kernel",
    "/proc/sys/vm",
)
_PLAIN_DEVICES = ("/dev/null",)
_PLAIN_READ = ("/dev/urandom", "/dev/random")
_STACK_BYTES = 8 << 20  # Linux's default


class Tier(StrEnum):
    """Strength of confinement. It is chosen by trying, and printed in every report. Tiers are
    ordered: each has all that those below it have.
    """

    T0 = "T0"
    """Process group, subreaper, limits, clean environment: stops accidents, not attacks."""
    T1 = "T1"
    """T0, no_new_privs, Landlock, seccomp, and another user where the caller is root."""
    T2 = "T2"
    """T1 and namespaces: processes, network, IPC objects, mounts with /proc, /tmp, /dev/shm."""
    T3 = "T3"
    """T2 and a control group: the kernel limits memory and processes of the whole subtree."""


ISOLATION = "KAGENT_ISOLATION"
"""Variable with the tier that is asked for: the judge's process inherits it."""


def ask_for(isolation: str) -> None:
    """Ask for a tier in this process and those that it starts: "auto", or exactly one.

    Raises:
        UserError: It is neither.
    """
    os.environ[ISOLATION] = isolation
    asked_for()


def asked_for() -> Tier | None:
    """The tier that is asked for, None for the highest that works.

    Raises:
        UserError: The variable holds something else.
    """
    text = os.environ.get(ISOLATION) or "auto"
    if text == "auto":
        return None
    try:
        return Tier(text)
    except ValueError:
        tiers = ", ".join(Tier)
        raise UserError(f"isolation {text!r}: expected auto, or one of {tiers}") from None


@dataclass(frozen=True)
class Confinement:
    """Rights of a child. Paths are absolute; those that do not exist are skipped.

    Not covered: bandwidth of memory and caches, time on other cores, hyper-threads; what `read`
    names may be read in full. Memory and processes of the whole subtree are polled below tier T3,
    disk below tier T2, open files always. Below T2 and where the caller is not root, children of
    one user are kept apart by Landlock alone: signals among them need Linux 6.12, and before 6.2 a
    readable file of the caller's own can be truncated.
    """

    read: tuple[str, ...] = ()  # files and folders to read and execute
    write: tuple[str, ...] = ()  # folders to write, besides the private one
    devices: tuple[str, ...] = ()  # device nodes to open for reading, writing and ioctl
    memory_bytes: int = 8 << 30  # per process by rlimit, and of the subtree
    cpu_s: int = 600  # per process
    processes: int = 128  # processes and threads of the subtree
    files: int = 512  # open files per process
    open_files: int = 4096  # open files of the subtree
    file_bytes: int = 1 << 30  # size of one file
    disk_bytes: int = 2 << 30  # of the private folder
    disk_files: int = 20_000  # of the private folder
    output_bytes: int = 64 << 20  # of stdout and stderr, after which the child is killed
    nice: int = 0  # taken off its share of the processor where others want it
    execute: bool = True  # may start programs: compilers
    memfd: bool = False  # may create anonymous files: the CUDA driver does
    tightens: bool = False  # may filter its calls further: who does so forbids it at the end
    tier: Tier | None = None  # exactly this one; None: what is asked for, or the highest but T0

    @property
    def least(self) -> Tier:
        """The tier without which nothing is started."""
        return Tier.T1 if self.tier is None else self.tier

    @property
    def most(self) -> Tier:
        """The highest tier to try."""
        return Tier.T3 if self.tier is None else self.tier

    @property
    def paths(self) -> tuple[str, ...]:
        """All that it names."""
        return (*self.read, *self.write, *self.devices)


def set_limits(confinement: Confinement, *, others: int) -> None:
    """Set resource limits.

    `others` is how many tasks the user runs already: the limit counts them too.
    """
    limits = {
        # AS would refuse CUDA's reservations. A child is born with its fork-server's data: 0.2 GB
        # of torch's libraries, 0.8 GB of its build for CUDA. That is shared, and not its own.
        resource.RLIMIT_DATA: confinement.memory_bytes + _data_bytes(),
        resource.RLIMIT_CPU: confinement.cpu_s,
        resource.RLIMIT_NPROC: confinement.processes + others,
        resource.RLIMIT_NOFILE: confinement.files,
        resource.RLIMIT_FSIZE: confinement.file_bytes,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_CORE: 1,  # 1, unlike 0, also keeps piped core handlers from starting
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))
    # Endless recursion is a fault where stacks end; without an end it would be the memory's. The
    # hard limit stays: g++ raises its own.
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(_STACK_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))


def enter(confinement: Confinement, uid: int | None, *, need_search: bool) -> None:
    """Limits, and another user when `uid` is given (the caller is root). Irreversible.

    Raises:
        OSError: The kernel refuses.
    """
    others = 0 if uid is not None else _tasks_of_user()
    set_limits(confinement, others=others)
    os.nice(confinement.nice)
    if uid is not None:
        become(uid, need_search=need_search)
    elif os.geteuid() == 0:
        drop_capabilities()
    prctl(38, 1)  # PR_SET_NO_NEW_PRIVS


def lock(confinement: Confinement, private: Path) -> None:
    """Landlock for this thread, seccomp for all threads. Irreversible.

    Raises:
        OSError: The kernel lacks one of them.
    """
    proc = tuple(f"/proc/{name}" for name in _SELF_PROC)
    read = (*_SYSTEM_FILES, *_PLAIN_READ, *proc, *confinement.read)
    write = (str(private), *confinement.write)
    landlock.restrict(read, write, (*_PLAIN_DEVICES, *confinement.devices))
    seccomp.install_allow_list(
        execute=confinement.execute, memfd=confinement.memfd, tightens=confinement.tightens
    )


def _data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmData:")[2].split(maxsplit=1)[0]) << 10


def _tasks_of_user() -> int:
    """Tasks that the calling user runs: RLIMIT_NPROC counts them with the child's."""
    uid = os.getuid()
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                if entry.stat().st_uid == uid:
                    # each thread is one link of the task folder, besides . and ..
                    count += os.stat(f"/proc/{entry.name}/task").st_nlink - 2
            except OSError:
                continue
    return count


def readable_by_others(paths: tuple[str, ...]) -> bool:
    """Whether a user without rights of their own can reach all of the paths that exist."""
    for text in paths:
        path = Path(text)
        try:
            for part in (path, *path.parents):
                mode = part.stat().st_mode
                if not mode & (stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH):
                    return False
        except OSError:
            continue
    return True
