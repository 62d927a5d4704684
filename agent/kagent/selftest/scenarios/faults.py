"""Faults that no candidate file can cause: of the machine, of the judge's process, of the disk."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.client import JudgeClient
from kagent_sandbox.process import process_tree

from kagent.resources import corpus_folder
from kagent.selftest.assemble import candidate_text
from kagent.selftest.catalogue import PASSED
from kagent.selftest.expectations import EntryOutcome, of_verdict
from kagent.selftest.jobs import Job
from kagent.selftest.scenario import ScenarioRun

_GONE_S = 10.0  # for processes to end
_APPEARS_S = 60.0  # for a launcher to come up on a busy machine


def launcher_killed(scenario_run: ScenarioRun) -> EntryOutcome:
    """Kill the first launcher that has a candidate. The kernel must be judged once more."""
    honest = _built(scenario_run, "honest/rows_cpp.py")
    with _judge(scenario_run) as judge, ThreadPoolExecutor(1) as threads:
        checked = threads.submit(judge.check, honest)
        os.kill(_launcher(judge), signal.SIGKILL)
        seen = of_verdict(checked.result())
    if seen.outcome != PASSED:
        return seen
    return EntryOutcome(
        PASSED, log="a launcher was killed from outside; the kernel was judged again"
    )


def judge_killed(scenario_run: ScenarioRun) -> EntryOutcome:
    """The judge is killed while a kernel runs that never ends; its successor judges another."""
    endless = _built(scenario_run, "faults/14_endless_kernel/loop_cpp.py")
    honest = _built(scenario_run, "honest/rows_cpp.py")
    with _judge(scenario_run) as judge, ThreadPoolExecutor(1) as threads:
        running = threads.submit(judge.check, endless)
        _launcher(judge)
        processes = process_tree.descendants(judge.pid)
        began = time.monotonic()
        os.kill(judge.pid, signal.SIGKILL)
        left = _wait_gone(processes)
        took_s = time.monotonic() - began
        running.result()  # a successor was asked again, and has met the limit
        seen = of_verdict(judge.check(honest))
    if left:
        return EntryOutcome(
            "left behind", f"{len(left)} of {len(processes)} processes are still there"
        )
    if seen.outcome != PASSED:
        return seen
    text = f"all {len(processes)} processes of the judge ended within {took_s:.1f} s"
    return EntryOutcome(PASSED, log=f"{text}; its successor judged the kernel")


def deadly_candidate(scenario_run: ScenarioRun) -> EntryOutcome:
    """Every judge dies while it has this candidate: it is set aside, and others are judged."""
    endless = _built(scenario_run, "faults/14_endless_kernel/loop_cpp.py")
    honest = _built(scenario_run, "honest/rows_cpp.py")
    with _judge(scenario_run) as judge, ThreadPoolExecutor(1) as threads:
        checked = threads.submit(judge.check, endless)
        for _ in range(2):
            victim = judge.pid
            _launcher(judge)
            os.kill(victim, signal.SIGKILL)
            while judge.pid == victim and not checked.done():
                time.sleep(0.01)
        verdict = checked.result()
        after = judge.check(honest)
    return of_verdict(after if isinstance(after, Rejected) else verdict)


def disk_full(scenario_run: ScenarioRun) -> EntryOutcome:
    """A run's folder on a disk that fills up: nothing that was recorded is lost.

    The disk is a small one of its own where this host lets us mount one, otherwise a limit on the
    size of files.
    """
    script = Path(__file__).with_name("full_disk.py")
    done = subprocess.run(
        [sys.executable, str(script), str(scenario_run.folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    if done.returncode:
        return EntryOutcome("lost", f"{done.stdout}{done.stderr}".strip()[-2000:])
    return EntryOutcome("kept", done.stdout.strip())


# -- what scenarios have in common ---------------------------------------------------------------


def _built(scenario_run: ScenarioRun, path: str) -> Built:
    """A candidate of the corpus, built for the small task's check cases."""
    corpus = corpus_folder()
    job = Job(candidate_text(corpus / path), corpus / "tasks" / "rows", "cpu", measured=False)
    attempt = scenario_run.evaluator.build(job)
    attempt.bait.close()
    if attempt.error is not None:
        raise attempt.error
    if not isinstance(attempt.built, Built):
        raise UserError(f"{path} does not build: {attempt.built}")
    return attempt.built


@contextlib.contextmanager
def _judge(scenario_run: ScenarioRun) -> Iterator[JudgeClient]:
    """A judge of a scenario's own, whose helpers have come up, and no launcher runs."""
    task = corpus_folder() / "tasks" / "rows"
    timeout_scale = scenario_run.evaluator.timeout_scale
    with JudgeClient(
        task,
        "cpu",
        scenario_run.evaluator.seed,
        timeout_scale=timeout_scale,
        eager_only=True,
        take_turns=False,
    ) as judge:
        judge.health()
        yield judge


def _launcher(judge: JudgeClient) -> int:
    """Wait for a launcher: judge, fork-server, supervisor, then the process itself."""
    deadline = time.monotonic() + _APPEARS_S
    while time.monotonic() < deadline:
        for server in process_tree.children(judge.pid):
            for supervisor in process_tree.children(server):
                if found := process_tree.descendants(supervisor):
                    return found[-1]
        time.sleep(0.002)
    raise UserError(f"no launcher came up within {_APPEARS_S:g} s")


def _wait_gone(processes: list[int]) -> list[int]:
    """Wait for processes to end; return those that do not."""
    deadline = time.monotonic() + _GONE_S
    while time.monotonic() < deadline:
        left = [p for p in processes if not process_tree.ended(p)]
        if not left:
            return []
        time.sleep(0.01)
    return left
