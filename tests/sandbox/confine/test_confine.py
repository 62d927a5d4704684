import errno
import os
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from confined_handlers import ask
from kagent_sandbox.confine import (
    builder_confinement,
    cpu_launcher_confinement,
    gpu_launcher_confinement,
    interpreter_confinement,
    syscalls,
)
from kagent_sandbox.confine.policy import readable_by_others
from kagent_sandbox.confine.presets import toolchain
from kagent_sandbox.process import process_tree
from kagent_sandbox.process.forkserver import ForkServer

HANDLER = "confined_handlers:execute"


@pytest.fixture(scope="module")
def server():
    with ForkServer(HANDLER, confinement=builder_confinement()) as server:
        yield server


@pytest.fixture
def child(server):
    with server.spawn(wall_limit_s=60.0) as child:
        yield child


@pytest.fixture
def secret(tmp_path):
    """A file that file permissions alone would let everybody read and write."""
    path = tmp_path / "secret"
    path.write_text("key")
    path.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and str(folder) != "/":
            folder.chmod(folder.stat().st_mode | 0o055)
        if folder == Path(tempfile.gettempdir()):
            break
    return path


def test_files_outside_cannot_be_read_or_written(child, secret):
    refused = {"PermissionError", "FileNotFoundError"}  # not there, where /tmp is its own
    assert ask(child, f"open({str(secret)!r}).read()") in refused
    assert ask(child, f"open({str(secret)!r}, 'a')") in refused
    assert ask(child, f"os.unlink({str(secret)!r})") in refused
    assert ask(child, f"os.listdir({str(secret.parent)!r})") in refused
    assert ask(child, f"open({str(secret.parent / 'new')!r}, 'w')") in refused
    assert ask(child, f"os.link({str(secret)!r}, 'mine')") in {*refused, "OSError"}
    ask(child, f"os.chmod({str(secret)!r}, 0o777)")  # answered, without effect
    assert secret.stat().st_mode & 0o777 == 0o666
    assert secret.read_text() == "key"


@pytest.mark.parametrize("path", ["/etc/passwd", "/root", "/home", "/var/log", "/dev/shm", "/tmp"])
def test_the_system_outside_the_toolchain_is_closed(child, path):
    source = f"p = {path!r}; os.listdir(p) if os.path.isdir(p) else open(p).read()"
    assert ask(child, source) in {"PermissionError", "FileNotFoundError"}


def test_the_toolchain_does_not_hold_homes_or_the_repository():
    paths = [Path(p) for p in toolchain()]
    repository = Path(__file__).parents[3]
    for outside in (Path.home(), Path("/etc"), Path("/"), repository):
        assert not any(outside == p or p in outside.parents for p in paths), outside


@pytest.mark.parametrize(
    "source",
    [
        "import socket; socket.socket()",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socket(16, 3)",  # netlink
        "import socket; socket.socketpair(type=socket.SOCK_DGRAM)",
    ],
)
def test_there_is_no_network(child, source):
    assert ask(child, source) == "PermissionError"


def test_a_listening_socket_of_the_host_is_out_of_reach(child):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert ask(child, source) == "PermissionError"


def supervisor_of(server):
    """The one that was started last."""
    return max(process_tree.children(server._process.pid))


def test_other_processes_are_out_of_reach(server, child):
    assert ask(child, "result = 1") == 1  # `spawn` returns before the server has forked
    gone = {"PermissionError", "ProcessLookupError", "FileNotFoundError"}  # in its own namespace
    for pid in (os.getpid(), 1, supervisor_of(server)):
        assert ask(child, f"if {pid} != 1: os.kill({pid}, 9)") in {None, *gone}
        assert ask(child, f"open('/proc/{pid}/environ').read()") in gone
        assert ask(child, f"open('/proc/{pid}/mem', 'r+b')") in gone
        assert ask(child, f"os.sched_setaffinity({pid}, [0])") in gone
        assert ask(child, f"os.setpriority(os.PRIO_PROCESS, {pid}, 5)") in gone
    assert ask(child, "os.kill(-1, 9)") == "ProcessLookupError" or ask(child, "result = 1") == 1
    assert ask(child, "result = os.getpid() > 0")


SYSCALLS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "mount": (165, 40),
    "setns": (308, 268),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "open_by_handle_at": (304, 265),
    "mknodat": (259, 33),
    "sched_setscheduler": (144, 119),
    "setxattr": (188, 5),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
}


@pytest.mark.parametrize("name", SYSCALLS)
def test_dangerous_calls_are_refused(child, name):
    import platform

    number = SYSCALLS[name][platform.machine() != "x86_64"]
    source = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall({number}, 0, 0, 0, 0, 0)
result = errno.errorcode[ctypes.get_errno()]
"""
    assert ask(child, source) == "EPERM"


@pytest.mark.parametrize("command", ["F_SETOWN", "F_SETSIG"])
def test_the_kernel_is_not_asked_to_send_signals(child, command):
    source = f"import fcntl\nresult = fcntl.fcntl(1, fcntl.{command}, 9)"
    assert ask(child, source) == "PermissionError"
    assert ask(child, "import fcntl\nfcntl.ioctl(1, 0x8901, bytes(4))") == "PermissionError"
    assert ask(child, "import fcntl\nresult = fcntl.fcntl(1, fcntl.F_GETFD)") == 0


def test_namespaces_cannot_be_entered_through_clone(child):
    source = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
pid = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)
result = errno.errorcode[ctypes.get_errno()] if pid < 0 else "escaped"
"""
    assert ask(child, source) == "EPERM"


def test_a_child_is_another_user_where_we_are_root(server, child):
    uid = ask(child, "result = os.getuid()")
    assert (uid != os.getuid()) == server.isolation.drops_uid
    with server.spawn(wall_limit_s=60.0) as other:
        if server.isolation.drops_uid:
            assert ask(other, "result = os.getuid()") != uid
    assert ask(child, "os.setuid(0)") == "PermissionError"


def test_programs_start_only_where_allowed(child):
    run = "import subprocess; result = subprocess.run(['g++', '--version'], capture_output=True)"
    assert ask(child, run + ".returncode") == 0
    write = "open('tool', 'w').write('#!/bin/sh'); os.chmod('tool', 0o755); "
    assert ask(child, write + "import subprocess; subprocess.run('./tool')") == "PermissionError"
    for preset in (interpreter_confinement(), cpu_launcher_confinement()):
        with ForkServer(HANDLER, confinement=preset) as other, other.spawn(wall_limit_s=9.0) as one:
            assert ask(one, run) == "PermissionError"


def test_no_thread_has_descriptors_of_its_own(child):
    libc = "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
    close_range = f"result = libc.syscall({syscalls.number('close_range')}, 1000, 1001, %d)"
    assert ask(child, libc + close_range % 0) == 0
    assert ask(child, libc + close_range % 2) == -1
    vm, sighand, thread = 0x100, 0x800, 0x10000
    # As a thread with a table of its own: refused before the kernel looks for its stack.
    own = f"libc.syscall({syscalls.number('clone')}, {vm | sighand | thread}, 0, 0, 0, 0)"
    assert ask(child, libc + own + "; result = ctypes.get_errno()") == errno.EPERM
    assert (
        ask(child, "import threading; t = threading.Thread(); t.start(); result = t.join()") is None
    )


def test_times_of_files_are_left_as_they_are(child):
    # Path.touch sets the time first, and makes the file only where that is refused.
    touch = "from pathlib import Path; Path('new').touch()"
    assert ask(child, f"{touch}; {touch}; result = os.listdir()") == ["new"]
    assert ask(child, "os.utime('new', (5, 5)); result = os.stat('new').st_mtime > 5") is True
    assert ask(child, "os.utime(os.open('new', os.O_WRONLY)); result = 'answered'") == "answered"
    assert ask(child, "os.utime('absent')") == "PermissionError"


def test_locking_later_binds_what_comes_after(server):
    with server.spawn(wall_limit_s=60.0, lock_first=False) as child:
        read = "result = open('/etc/passwd').read()[:4]"
        assert ask(child, read) == "root"
        assert ask(child, "context.lock(); context.lock(); result = 1") == 1
        assert ask(child, read) == "PermissionError"
        assert ask(child, "import socket; socket.socket()") == "PermissionError"


def test_a_folder_can_be_opened_for_writing(tmp_path, secret):
    writable = replace(builder_confinement(), write=(str(secret.parent),))
    with ForkServer(HANDLER, confinement=writable) as other, other.spawn(wall_limit_s=9.0) as child:
        assert ask(child, f"open({str(secret)!r}, 'w').write('new'); result = 1") == 1
    assert secret.read_text() == "new"


def test_devices_of_the_gpu_preset_are_device_nodes():
    for node in gpu_launcher_confinement().devices:
        assert not Path(node).is_dir()
        assert node.startswith("/dev/nvidia")


def test_whether_others_can_read_is_seen(tmp_path):
    assert readable_by_others(("/usr",))
    tmp_path.chmod(0o700)
    assert not readable_by_others((str(tmp_path),))
    assert readable_by_others((str(tmp_path / "missing"),)) in {True, False}
