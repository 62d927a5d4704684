"""Real processes that try to exceed every limit of a subtree, under every tier there is here."""

import contextlib
import mmap
import os
import resource
from dataclasses import replace

import pytest
from confined_handlers import ask
from kagent_sandbox.confine import Confinement, Tier
from kagent_sandbox.confine.policy import set_limits
from kagent_sandbox.confine.presets import toolchain
from kagent_sandbox.errors import ConfinementError
from kagent_sandbox.process.channel import ChannelClosed
from kagent_sandbox.process.forkserver import ForkServer

LIMITS = Confinement(
    read=toolchain(),
    memory_bytes=256 << 20,
    cpu_s=30,
    processes=24,
    files=64,
    open_files=200,
    file_bytes=24 << 20,
    disk_bytes=32 << 20,
    disk_files=300,
    output_bytes=1 << 20,
)
WALL_S = 60.0
FORKS = """
import os, time
for _ in range({count}):
    if os.fork() == 0:
        {work}
        time.sleep(60)
time.sleep(60)
"""
TRIES = {
    # each process stays within its own limit, all of them together do not
    "memory": (FORKS.format(count=3, work="b = b'x' * (100 << 20)"), "memory limit of 256 MiB"),
    "open files": (
        FORKS.format(count=6, work="held = [os.open('/dev/null', 0) for _ in range(50)]"),
        "limit of 200 open files",
    ),
    "disk": (
        "import time\n"
        "for i in range(2): open(f'f{i}', 'wb').write(b'x' * (20 << 20))\n"
        "time.sleep(60)",
        "disk limit of 32 MiB",
    ),
    "number of files": (
        "import time\nfor i in range(400): open(f'f{i}', 'w').close()\ntime.sleep(60)",
        "limit of 300 files",
    ),
    "output": ("while True: print('x' * 10000)", "output limit of 1 MiB"),
    "time": ("while True: pass", "wall limit"),
}


@pytest.fixture(scope="module", params=[Tier.T0, Tier.T1, Tier.T2, Tier.T3])
def server(request):
    confinement = replace(LIMITS, tier=request.param)
    with ForkServer("confined_handlers:execute", confinement=confinement) as server:
        try:
            assert server.isolation.tier is request.param
        except ConfinementError as e:
            pytest.skip(str(e))
        yield server


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("what", TRIES)
def test_a_subtree_that_takes_more_is_ended(server, what):
    source, reason = TRIES[what]
    with server.spawn(wall_limit_s=2.0 if what == "time" else WALL_S) as child:
        child.channel.send(source)
        exit_ = child.wait(WALL_S + 10.0)
        assert exit_.reason == reason, exit_
        if what == "memory":
            assert exit_.max_rss_mib < 600


BOMBS = {
    "processes": """
import os
made = 0
for _ in range(100):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(60)
    made += 1
result = made
""",
    "threads": """
import threading
made = 0
for _ in range(100):
    try:
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    except RuntimeError:
        break
    made += 1
result = made
""",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_goes_out(server, what):
    """The kernel refuses more, where it counts them by user or group; else the look comes."""
    with server.spawn(wall_limit_s=WALL_S) as child:
        child.channel.send(BOMBS[what])
        try:
            made = child.channel.recv(WALL_S).obj["result"]
        except ChannelClosed:
            assert child.wait(WALL_S).reason == "limit of 24 processes"
        else:
            counted_apart = server.isolation.drops_uid or server.isolation.tier is Tier.T3
            assert made < 24 or not counted_apart
            if made >= 24:
                assert child.wait(WALL_S).reason == "limit of 24 processes"


def test_limits_of_each_process_are_errors_in_it(server):
    with server.spawn(wall_limit_s=WALL_S) as child:
        assert ask(child, "b = bytearray(300 << 20)") == "MemoryError"
        assert ask(child, "held = [os.open('/dev/null', 0) for _ in range(100)]") == "OSError"
        assert ask(child, "open('big', 'wb').write(b'x' * (25 << 20))") == "OSError"
        core = "import resource; result = resource.getrlimit(resource.RLIMIT_CORE)"
        assert ask(child, core) == [1, 1]


def test_processor_time_is_limited_for_each_process():
    confinement = replace(LIMITS, cpu_s=1)
    with (
        ForkServer("confined_handlers:execute", confinement=confinement) as server,
        server.spawn(wall_limit_s=WALL_S) as child,
    ):
        child.channel.send("while True: pass")
        exit_ = child.wait(WALL_S)
        assert "SIGXCPU" in exit_.describe() or "SIGKILL" in exit_.describe()


def test_who_takes_more_at_once_than_a_look_sees_is_stopped_by_the_kernel(server):
    """Between two looks: files beyond the private folder's size, where it is one in memory."""
    source = """
import errno
result = "no limit"
try:
    for i in range(12):
        with open(f"f{i}", "wb") as file:
            file.write(bytes(16 << 20))
except OSError as e:
    result = errno.errorcode[e.errno]
"""
    if server.isolation.tier < Tier.T2:
        pytest.skip("below tier T2 the folder is one of the host's, and only looked at")
    with server.spawn(wall_limit_s=WALL_S) as child:
        child.channel.send(source)
        with contextlib.suppress(ChannelClosed):  # the look came first
            assert child.channel.recv(WALL_S).obj == {"result": "ENOSPC"}
        assert child.wait(WALL_S).reason == "disk limit of 32 MiB"


def test_a_role_that_gives_way_is_nice():
    with (
        ForkServer("confined_handlers:execute", confinement=replace(LIMITS, nice=7)) as server,
        server.spawn(wall_limit_s=WALL_S) as child,
    ):
        assert ask(child, "result = os.getpriority(os.PRIO_PROCESS, 0)") == 7
        assert ask(child, "os.setpriority(os.PRIO_PROCESS, 0, 0)") == "PermissionError"


def test_a_stack_ends_also_where_the_users_does_not():
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (before[1], before[1]))
    try:
        server = ForkServer("confined_handlers:execute", confinement=LIMITS)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)
    with server, server.spawn(wall_limit_s=WALL_S) as child:
        soft = "import resource; result = resource.getrlimit(resource.RLIMIT_STACK)[0]"
        assert ask(child, soft) == 8 << 20


def test_the_memory_of_the_fork_server_is_not_its_childs():
    """torch's build for CUDA brings more than a launcher's share of a small machine."""
    brought = mmap.mmap(-1, 512 << 20, flags=mmap.MAP_PRIVATE)
    pid = os.fork()
    if pid == 0:
        taken = 0
        with contextlib.suppress(BaseException):  # the fork never gets back into pytest
            set_limits(LIMITS, others=1000)
            for size in (200 << 20, 300 << 20):
                mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)
                taken += 1
        os._exit(taken)
    brought.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1  # of 200 and 300 MiB
