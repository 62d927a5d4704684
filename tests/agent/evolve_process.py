"""A running `kagent evolve`, its processes by role, and what it leaves behind."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import warm_python
from kagent_sandbox.process import process_tree

SECONDS = 60.0
"""After which nothing may be left; it takes about two."""


class EvolveProcess:
    """A running `kagent evolve`, and what there was before it."""

    def __init__(self, task, folder, *, tier="auto", runs="runs", budget=100, **environment):
        self.scratch = folder / "scratch"
        self.scratch.mkdir()
        self.runs = folder / runs
        self.lines = []
        warm_python.ready()
        self.before = set(process_tree.descendants(os.getpid()))
        self.objects = objects()
        words = ["evolve", task, "--lang", "cpp", "--budget", budget, "--runs", self.runs]
        words.append("--no-early-stop")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kagent", *map(str, words), "--isolation", tier],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(self.scratch), **environment},
        )

    def wait_until(self, seen):
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(seen, line):
                return
        raise AssertionError(self.process.stderr.read())

    def roles(self):
        """Process ids by role; of children those that are there at the moment."""
        agent = self.process.pid
        found = {"agent": agent}
        for pid in process_tree.children(agent):
            words = command(pid)
            if "kagent_sandbox.judge.server" in words:
                found["judge"] = pid
                for inner in process_tree.children(pid):
                    if "zygote" in command(inner):
                        found["launchers' server"] = inner
            elif "zygote" in words:
                found["builders' server"] = pid
        for role in ("builder", "launcher"):
            for keeper in process_tree.children(found.get(f"{role}s' server", 0)):
                found[f"{role}'s keeper"] = keeper
                for pid in process_tree.children(keeper):
                    if "init" not in command(pid):
                        found[role] = pid
        return found

    def kill(self, name):
        """Kill a role as soon as it is there, unless the run is over before."""
        while self.process.poll() is None:
            found = self.roles()
            if name in found:
                with contextlib.suppress(ProcessLookupError):  # it was done meanwhile
                    os.kill(found[name], signal.SIGKILL)
                    return
            time.sleep(0.01)

    def left(self):
        """All that is there and was not before."""
        living = [
            f"process {p}: {command(p)}"
            for p in process_tree.descendants(os.getpid())
            if p not in self.before and not process_tree.ended(p)
        ]
        # torch makes its folder wherever it is imported to compile; nothing may be left in it.
        files = [
            f"file {p}"
            for p in self.scratch.iterdir()
            if "inductor" not in p.name or any(p.iterdir())
        ]
        return living + files + sorted(objects() - self.objects)

    def assert_nothing_left(self):
        deadline = time.monotonic() + SECONDS
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def objects():
    """Mounts, IPC objects and control groups of the host that kagent could have made."""
    found = {f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    found |= {f"shared file {p}" for p in Path("/dev/shm").glob("kagent*")}
    for kind in ("shm", "sem", "msg"):
        lines = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()[1:]
        found |= {f"SysV {kind} {' '.join(line.split()[:2])}" for line in lines}
    for root in Path("/sys/fs/cgroup").glob("**/kagent-*"):
        found.add(f"control group {root}")
    return found
