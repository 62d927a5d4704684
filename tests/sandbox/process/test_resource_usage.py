"""What hostile children hide from whoever weighs them, and leave for whoever cleans up."""

import ctypes
import mmap
import os
import signal
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from kagent_sandbox.confine import syscalls
from kagent_sandbox.process import process_tree
from kagent_sandbox.process import resource_usage as usage
from kagent_sandbox.process.remove_tree import remove_tree
from kagent_sandbox.process.resource_usage import disk_use, memory_bytes

MIB = 1 << 20
NOBODY = 65_534


@contextmanager
def forked(action, then=signal.pause):
    """A child that has carried out `action`, keeps what it returned, and does something `then`."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = action()
            os.write(write, b"x")
            then()
            del kept
        finally:
            os._exit(1)
    try:
        os.close(write)
        assert os.read(read, 1) == b"x", "the child failed"
        yield pid
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextmanager
def leaderless(action):
    """The same, but the child's first thread has ended by itself, and another one runs on."""
    with forked(action, then=end_this_thread_alone) as pid:
        while "Z" not in Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2]:
            time.sleep(0.001)
        yield pid


def end_this_thread_alone():
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall(syscalls.number("exit"), 0)


def filled(nbytes, *, flags):
    memory = mmap.mmap(-1, nbytes, flags=flags | mmap.MAP_ANONYMOUS)
    for at in range(0, nbytes, mmap.PAGESIZE):
        memory[at] = 1
    return memory


@pytest.mark.parametrize("child", [forked, leaderless])
@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_memory_is_counted_shared_or_not(flags, child):
    with child(lambda: filled(64 * MIB, flags=flags)) as pid:
        assert memory_bytes([pid]) >= 64 * MIB


def test_memory_that_was_given_is_not_the_childs():
    with forked(lambda: filled(64 * MIB, flags=mmap.MAP_SHARED)) as pid:
        everything = memory_bytes([pid])
        assert memory_bytes([pid], given_bytes=64 * MIB) == everything - 64 * MIB


def test_a_process_that_is_gone_weighs_nothing():
    with forked(lambda: None) as pid:
        pass
    assert memory_bytes([pid]) == 0


def test_a_process_that_is_taken_apart_is_exiting():
    seen = []
    for _ in range(10):
        with forked(lambda: filled(512 * MIB, flags=mmap.MAP_PRIVATE)) as pid:
            assert not process_tree.exiting(pid)
            os.kill(pid, signal.SIGKILL)
            while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                seen.append(process_tree.exiting(pid))
            assert not process_tree.exiting(pid), "it is done"
        if any(seen):
            break
    assert any(seen)


def test_a_process_is_not_exiting_while_a_thread_of_it_runs():
    with leaderless(lambda: None) as pid:
        assert not process_tree.exiting(pid)


def nameless(folder):
    file = open(folder / "large", "wb")  # noqa: SIM115 - it is kept open
    os.unlink(folder / "large")
    os.posix_fallocate(file.fileno(), 0, 32 * MIB)
    return file


def nameless_and_mapped(folder):
    path = folder / "a carriage\rreturn"
    with open(path, "w+b") as file:
        os.unlink(path)
        os.posix_fallocate(file.fileno(), 0, 32 * MIB)
        return mmap.mmap(file.fileno(), 32 * MIB)


@pytest.mark.parametrize("child", [forked, leaderless])
@pytest.mark.parametrize("hide", [nameless, nameless_and_mapped])
def test_files_without_a_name_count(tmp_path, hide, child):
    folder = tmp_path / "own"
    folder.mkdir()
    others = tmp_path / "others"
    with others.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 32 * MIB)
    with child(lambda: hide(folder)) as pid:
        others.unlink()  # the file system has as much room as before
        used, files = disk_use(folder, [pid], 100)[:2]
    assert 32 * MIB <= used < 33 * MIB
    assert files == 0


def nested(folder, levels, name):
    """Folders in folders, with a file in the innermost one; returns a descriptor of `folder`."""
    start = os.open(folder, os.O_RDONLY)
    before = os.open(".", os.O_RDONLY)
    try:
        os.fchdir(start)
        for _ in range(levels):
            os.mkdir(name)
            os.chdir(name)
        with open("large", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 * MIB)
    finally:
        os.fchdir(before)
        os.close(start)
        os.close(before)


def test_folders_deeper_than_a_path_count(tmp_path):
    nested(tmp_path, 30, "d" * 200)
    used, files, _ = disk_use(tmp_path, [], 100)
    assert used >= 1 * MIB
    assert files == 31
    remove_tree(tmp_path)
    assert not tmp_path.exists()


def test_absurd_depth_is_over_the_limit(tmp_path):
    nested(tmp_path, 2000, "-rf \x1b[2J\n")
    assert disk_use(tmp_path, [], 10_000)[1] == 10_001
    remove_tree(tmp_path)
    assert not tmp_path.exists()


def test_files_are_counted_no_further_than_their_limit(tmp_path):
    for number in range(20):
        (tmp_path / str(number)).touch()
    assert disk_use(tmp_path, [], 10)[1] == 11
    assert disk_use(tmp_path, [], 20)[1] == 20


def test_removal_leaves_alone_what_links_lead_to(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "kept").touch()
    (folder / "a" / "kagent-removes-1").mkdir(parents=True)
    (folder / "a" / "out").symlink_to(outside)
    (folder / "out").symlink_to(outside)
    (folder / "kagent-removes-2").touch()
    os.mkfifo(folder / "pipe")
    remove_tree(folder)
    assert not folder.exists()
    assert [p.name for p in outside.iterdir()] == ["kept"]
    assert outside.stat().st_mode & 0o777 != 0o700


def _as_nobody(action):
    """Run it in a child that is not root: root may do anything. Whether it returned True."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            code = 0 if action() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_folders_without_rights_are_weighed_and_removed_by_their_own_user():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)

        def weighed_and_removed():
            made = folder / "made"
            for inner, mode in (("hidden", 0o300), ("closed", 0)):
                (made / inner / "locked").mkdir(parents=True)
                (made / inner / "large").write_bytes(bytes(1 * MIB))
                (made / inner / "locked").chmod(0o500)
                (made / inner).chmod(mode)
            used, files, _ = disk_use(made, [], 100)
            for inner in ("hidden", "closed"):
                (made / inner).chmod(0o300)
            remove_tree(made)
            return used >= 2 * MIB and files == 6 and not made.exists()

        assert _as_nobody(weighed_and_removed)


def test_descriptors_count_whichever_thread_is_left():
    with leaderless(lambda: [open(os.devnull) for _ in range(50)]) as pid:
        assert process_tree.open_files([pid]) >= 50


def test_mappings_are_counted_no_further_than_the_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(usage, "MOST_MAPPINGS", 10)
    assert disk_use(tmp_path, [os.getpid()], 100)[2] == 11
