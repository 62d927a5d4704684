import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from confined_handlers import ask
from kagent_sandbox.confine import Confinement, builder_confinement
from kagent_sandbox.errors import ChildDied
from kagent_sandbox.process import process_tree, zygote
from kagent_sandbox.process.channel import ChannelClosed
from kagent_sandbox.process.forkserver import ForkServer

HANDLER = "confined_handlers:execute"
DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        for stream in (0, 1, 2):
            os.close(stream)
        context.channel.close()
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.fixture(scope="module")
def server():
    with ForkServer(HANDLER, confinement=builder_confinement()) as server:
        yield server


@pytest.fixture
def child(server):
    with server.spawn(wall_limit_s=60.0) as child:
        yield child


def limited(**limits):
    return ForkServer(HANDLER, confinement=replace(builder_confinement(), **limits))


def wait_closed(read):
    """Whether all copies of a pipe's writing end go away: all processes that held one are dead."""
    os.set_blocking(read, False)
    for _ in range(500):
        try:
            return os.read(read, 1) == b""
        except BlockingIOError:
            time.sleep(0.01)
    return False


def test_a_child_answers_and_exits(server):
    with server.spawn(wall_limit_s=60.0) as child:
        assert ask(child, "result = 6 * 7") == 42
        child.channel.send(None)
        exit_ = child.wait(10.0)
        assert exit_.code == 0
        assert exit_.signal is None
        assert not exit_.timed_out
        assert exit_.max_rss_mib > 1
        assert exit_ == child.wait(0.0) == child.kill()


def test_the_environment_is_clean_and_private(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with server.spawn(wall_limit_s=60.0) as child:
        env = ask(child, "import os; result = dict(os.environ)")
        tmp = ask(child, "result = str(context.tmp)")
        assert "OPENAI_API_KEY" not in env
        assert env["HOME"] == env["TMPDIR"] == tmp == ask(child, "result = os.getcwd()")
        assert "OPENAI" not in ask(child, "result = open('/proc/self/environ').read()")


def test_descriptors_are_passed_and_nothing_else_is_inherited(server):
    read, write = os.pipe()
    with server.spawn([write], wall_limit_s=60.0) as child:
        assert ask(child, "import os; result = os.write(context.fds[0], b'hello')") == 5
        assert os.read(read, 10) == b"hello"
        open_fds = "import os; result = len(os.listdir('/proc/self/fd'))"
        assert ask(child, open_fds) == 6  # 0, 1, 2, the channel, the pipe, the listing
    os.close(read)
    os.close(write)


GATHER = """
from kagent_sandbox.process import zygote
zygote.gathered = []
zygote.gather_pages = lambda: zygote.gathered.append(1)
"""
GATHERED = "from kagent_sandbox.process import zygote; result = len(zygote.gathered)"


def test_a_server_of_many_children_puts_its_heap_into_huge_pages_once(tmp_path, monkeypatch):
    (tmp_path / "counts_gathering.py").write_text(GATHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    preload = ["counts_gathering"]
    with ForkServer(HANDLER, preload=preload, confinement=builder_confinement()) as server:
        counts = []
        for _ in range(2 * zygote.FEW_CHILDREN):
            with server.spawn(wall_limit_s=60.0) as child:
                counts.append(ask(child, GATHERED))
    assert counts == [0] * (zygote.FEW_CHILDREN - 1) + [1] * (zygote.FEW_CHILDREN + 1)


def test_a_server_that_is_closed_while_a_thread_waits_for_its_imports_ends_itself(
    tmp_path, monkeypatch
):
    """It need not be killed, and the thread waits no longer."""
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    errors = []

    def spawn():
        try:
            server.spawn(wall_limit_s=60.0)
        except ChildDied as e:
            errors.append(e)

    thread = threading.Thread(target=spawn)
    with ForkServer(HANDLER, preload=["takes_long"], confinement=builder_confinement()) as server:
        process = server._process
        thread.start()
        while not server._lock.locked():
            time.sleep(0.01)
        time.sleep(0.1)  # it polls
    thread.join()
    assert process.returncode == 0
    assert len(errors) == 1


def test_a_child_that_is_just_being_spawned_is_not_missed_by_a_close(monkeypatch):
    """It would keep its server until that is killed."""
    errors, server = [], ForkServer(HANDLER, confinement=builder_confinement())
    asked, looked = threading.Event(), threading.Event()

    class Children(set):
        def __iter__(self):
            asked.wait()
            found = list(set.__iter__(self))
            looked.set()
            return iter(found)

        def add(self, child):
            asked.set()
            looked.wait()
            super().add(child)

    def spawn():
        try:
            server.spawn(wall_limit_s=60.0)
        except ChildDied as e:
            errors.append(e)

    server.start()
    assert server.isolation
    monkeypatch.setattr(server, "_children", Children())
    thread, process = threading.Thread(target=spawn), server._process
    thread.start()
    server.close()
    thread.join()
    assert process.returncode == 0
    assert len(errors) == 1


HEAP = """
from kagent_sandbox.process.huge_pages import gather_pages
kept = [bytes(1000) for _ in range(20_000)]
gather_pages()
with open("/proc/self/smaps_rollup") as rollup:
    print(*(line.split()[1] for line in rollup if line.startswith("AnonHugePages")))
assert kept == [bytes(1000)] * 20_000
"""


def test_heaps_are_put_into_huge_pages():
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this kernel has no huge pages")
    done = subprocess.run([sys.executable, "-c", HEAP], capture_output=True, text=True, check=True)
    major, minor = map(int, os.uname().release.split(".")[:2])
    assert int(done.stdout) > 0 or (major, minor) < (6, 1)


def test_the_private_folder_is_removed_however_it_is_left(server):
    with server.spawn(wall_limit_s=60.0) as child:
        tmp = Path(ask(child, "result = str(context.tmp)"))
        make = "import os; os.makedirs('a/b'); open('a/b/c', 'w').close(); os.symlink('/etc', 'l')"
        ask(child, make + "; result = os.listdir()")
        assert tmp.is_dir()
    assert not tmp.exists()


def test_kill_ends_double_forked_daemons(server):
    read, write = os.pipe()
    with server.spawn([write], wall_limit_s=60.0) as child:
        os.close(write)
        assert ask(child, DAEMON + "result = 'ok'") == "ok"
        assert child.kill().reason == "killed"
        assert os.read(read, 1) == b""
    os.close(read)


def test_a_normal_exit_ends_daemons_too(server):
    read, write = os.pipe()
    with server.spawn([write], wall_limit_s=60.0) as child:
        os.close(write)
        ask(child, DAEMON)
        child.channel.send(None)
        assert child.wait(10.0).code == 0
        assert os.read(read, 1) == b""
    os.close(read)


CLIENT = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from confined_handlers import ask
from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.process.forkserver import ForkServer
server = ForkServer("confined_handlers:execute", confinement=builder_confinement())
server.start()
child = server.spawn([int(sys.argv[2])], wall_limit_s=600.0)
ask(child, sys.argv[3])
print(ask(child, "result = str(context.tmp)"), flush=True)
time.sleep(600)
"""


def test_when_the_client_is_killed_everything_dies():
    read, write = os.pipe()
    arguments = [str(Path(__file__).parents[1]), str(write), DAEMON]
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments], pass_fds=[write], stdout=subprocess.PIPE
    ) as client:
        os.close(write)
        tmp = Path(client.stdout.readline().decode().strip())
        assert tmp.is_dir()
        client.kill()
    assert wait_closed(read)
    for _ in range(500):
        if not tmp.parent.exists():
            break
        time.sleep(0.01)
    assert not tmp.parent.exists()
    os.close(read)


ENDLESS_IMPORT = """
import os, pathlib, subprocess, time
inner = subprocess.Popen(["sleep", "600"])
words = [os.environ["HOME"], str(os.getpid()), str(inner.pid)]
pathlib.Path(os.environ["BEGUN"]).write_text(" ".join(words) + "\\n")
while True:
    try:
        time.sleep(600)
    except BaseException:
        pass
"""
IMPATIENT_CLIENT = """
import sys, time
sys.path.insert(0, sys.argv[1])
from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.process.forkserver import ForkServer
env = {"BEGUN": sys.argv[2]}
server = ForkServer("endless_import:f", confinement=builder_confinement(), env=env)
server.start()
time.sleep(600)
"""


@pytest.fixture
def endless_import(tmp_path):
    (tmp_path / "endless_import.py").write_text(ENDLESS_IMPORT)
    return tmp_path


def importing(folder):
    """Wait until the endless import has begun: the server's folder, itself, and what it started."""
    for _ in range(3000):
        with contextlib.suppress(FileNotFoundError):
            if (text := (folder / "begun").read_text()).endswith("\n"):
                home, *pids = text.split()
                return Path(home), list(map(int, pids))
        time.sleep(0.01)
    raise AssertionError("the import did not begin")


def assert_ended(pids):
    """Processes end within ten seconds; whatever does not is killed."""
    for _ in range(1000):
        if all(map(process_tree.ended, pids)):
            return
        time.sleep(0.01)
    left = [pid for pid in pids if not process_tree.ended(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    raise AssertionError(f"{len(left)} of {len(pids)} processes go on")


def test_a_server_that_still_imports_ends_when_it_is_closed(endless_import, monkeypatch):
    monkeypatch.syspath_prepend(endless_import)
    env = {"BEGUN": str(endless_import / "begun")}
    server = ForkServer("endless_import:f", confinement=builder_confinement(), env=env)
    server.start()
    process = server._process
    try:
        _, pids = importing(endless_import)
    finally:
        server.close()
    assert process.returncode == 0  # not killed after a long wait
    assert_ended(pids)


def test_a_server_that_still_imports_ends_when_its_client_is_killed(endless_import):
    arguments = [str(endless_import), str(endless_import / "begun")]
    with subprocess.Popen([sys.executable, "-c", IMPATIENT_CLIENT, *arguments]) as client:
        try:
            folder, pids = importing(endless_import)
        finally:
            client.kill()
    assert_ended(pids)
    assert not folder.exists()


def test_when_the_supervisor_is_killed_its_subtree_dies(server):
    read, write = os.pipe()
    with server.spawn([write], wall_limit_s=60.0) as child:
        os.close(write)
        ask(child, DAEMON)
        os.kill(max(process_tree.children(server._process.pid)), signal.SIGKILL)
        exit_ = child.wait(10.0)
        assert "supervisor" in exit_.describe()
        assert wait_closed(read)
    os.close(read)
    with server.spawn(wall_limit_s=60.0) as child:  # the others live on
        assert ask(child, "result = 1") == 1


def test_the_wall_limit(server):
    with server.spawn(wall_limit_s=0.2) as child:
        child.channel.send("while True: pass")
        exit_ = child.wait(10.0)
        assert exit_.timed_out
        assert exit_.describe() == "ended by the wall limit"


@pytest.mark.parametrize(
    ("source", "number"),
    [
        ("import ctypes; ctypes.string_at(8)", signal.SIGSEGV),
        ("import os; os.abort()", signal.SIGABRT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", signal.SIGILL),
    ],
)
def test_signals_are_named(server, source, number):
    with server.spawn(wall_limit_s=60.0) as child:
        child.channel.send(source)
        exit_ = child.wait(10.0)
        assert exit_.signal == number
        assert number.name in exit_.describe()
        assert "Fatal Python error" in exit_.log_tail
        with pytest.raises(ChannelClosed):
            child.channel.recv(1.0)


def test_stop_and_cont_reach_every_process(server):
    source = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        while True:
            os.write(context.fds[0], b'.')
            time.sleep(0.001)
"""
    read, write = os.pipe()
    os.set_blocking(read, False)
    with server.spawn([write], wall_limit_s=60.0) as child:
        os.close(write)
        ask(child, source)
        assert child.stop()
        while True:
            try:
                os.read(read, 1 << 16)
            except BlockingIOError:
                break
        time.sleep(0.05)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        assert child.cont()
        os.set_blocking(read, True)
        assert os.read(read, 1) == b"."
        child.kill()
        assert not child.stop()
        assert not child.cont()
    os.close(read)


def test_a_flood_of_output_is_bounded_and_harmless():
    with limited(output_bytes=1 << 20) as server, server.spawn(wall_limit_s=60.0) as child:
        child.channel.send("while True: print('\\x1b[31mred\\x07' * 1000)")
        exit_ = child.wait(20.0)
        assert exit_.reason == "output limit of 1 MiB"
        assert len(exit_.log_tail) <= 64 << 10
        assert "\x1b" not in exit_.log_tail
        assert "red" in exit_.log_tail


def test_memory_is_limited_per_process_and_per_tree():
    with limited(memory_bytes=300 << 20) as server:
        with server.spawn(wall_limit_s=60.0) as child:
            assert ask(child, "b = bytearray(400 << 20)") == "MemoryError"
        with server.spawn(wall_limit_s=60.0) as child:
            child.channel.send(
                "import os, time\nos.fork(); os.fork()\nb = b'x' * (150 << 20)\ntime.sleep(60)"
            )
            assert child.wait(20.0).reason == "memory limit of 300 MiB"
        with server.spawn(wall_limit_s=60.0) as child:
            child.channel.send(
                "import mmap, time\nb = mmap.mmap(-1, 400 << 20)\n"
                "for _ in range(400): b.write(bytes(1 << 20))\n"
                "time.sleep(60)"
            )
            assert child.wait(20.0).reason == "memory limit of 300 MiB"


def test_disk_and_files_are_limited():
    with limited(disk_bytes=20 << 20, disk_files=50, file_bytes=16 << 20) as server:
        with server.spawn(wall_limit_s=60.0) as child:
            fill = "import time\nfor i in range(3): open(f'f{i}', 'wb').write(b'x' * (10 << 20))\n"
            child.channel.send(fill + "time.sleep(60)")
            assert child.wait(20.0).reason == "disk limit of 20 MiB"
        with server.spawn(wall_limit_s=60.0) as child:
            child.channel.send(
                "import time\nfor i in range(80): open(f'f{i}', 'w').close()\ntime.sleep(60)"
            )
            assert child.wait(20.0).reason == "limit of 50 files"
        with server.spawn(wall_limit_s=60.0) as child:  # unlinked, but open
            fill = "for i in range(3):\n    files.append(open(f'f{i}', 'wb'))\n"
            fill += "    os.unlink(f'f{i}')\n    files[-1].write(bytes(10 << 20))\n"
            child.channel.send(f"import time\nfiles = []\n{fill}time.sleep(60)")
            assert child.wait(20.0).reason == "disk limit of 20 MiB"
        with server.spawn(wall_limit_s=60.0) as child:
            child.channel.send("open('big', 'wb').write(b'x' * (17 << 20))")
            assert child.channel.recv(10.0).obj["raised"] == "OSError"


def test_folders_of_any_depth_are_removed(server):
    """Below tier T2 such a child is ended at the next look at its folder, if it still runs."""
    deep = "for _ in range(1500):\n    os.mkdir('d' * 9)\n    os.chdir('d' * 9)\n"
    with server.spawn(wall_limit_s=60.0) as child:
        folder = ask(child, "result = str(context.tmp)")
        child.channel.send(f"{deep}os.mkdir('closed', 0)\nos._exit(0)")
        assert child.wait(20.0).reason in (None, "limit of 20000 files")
    assert not os.path.exists(folder)


def test_a_fork_bomb_ends():
    with limited(processes=40) as server, server.spawn(wall_limit_s=1.0) as child:
        child.channel.send("import os\nwhile True:\n  try: os.fork()\n  except OSError: pass")
        assert child.wait(30.0).timed_out
    # closing waits for all of them: their folder could not be removed otherwise


def test_a_fork_bomb_of_large_processes_is_killed_at_once():
    """Killing one of them makes room for others; and they are slow to weigh."""
    with limited(processes=100) as server, server.spawn(wall_limit_s=60.0) as child:
        child.channel.send(
            "import os, time\nb = b'x' * (100 << 20)\n"
            "while True:\n  try: os.fork()\n  except OSError: time.sleep(0.001)"
        )
        time.sleep(1.0)
        assert child.kill().reason in ("killed", "memory limit of 8192 MiB")


def test_several_threads_spawn_at_once(server):
    results = []

    def work(n):
        for i in range(3):
            with server.spawn(wall_limit_s=60.0) as child:
                results.append(ask(child, f"result = {n} * 10 + {i}") == n * 10 + i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 12


def test_descriptors_do_not_leak(server):
    def spawn():
        with server.spawn(wall_limit_s=60.0) as child:
            ask(child, "result = 1")

    spawn()
    gc.collect()  # what other tests have left in cycles goes now, and not while it is counted
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        spawn()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_fork_server_that_dies_is_reported():
    with limited() as server:
        assert server.isolation.landlock_abi > 0
        server._process.kill()
        server._process.wait()
        with pytest.raises(ChildDied, match="failed"):
            server.spawn(wall_limit_s=1.0)


def test_an_import_that_fails_is_reported():
    with (
        ForkServer("no_such_module:f", confinement=Confinement()) as server,
        pytest.raises(ChildDied, match="no_such_module"),
    ):
        server.spawn(wall_limit_s=1.0)
