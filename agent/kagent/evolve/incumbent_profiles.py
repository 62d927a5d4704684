"""Counters of ncu for each incumbent of a run, taken beside the search.

A profile waits until no candidate wants the device, and has it alone. If a newer incumbent comes
meanwhile, that one is profiled in its place. No verdict depends on it. What is found is stored with
the run: prompts, `kagent show`, the report and `--resume` read it there. Where ncu does not work,
that is stored and said once, and it is not asked again in this session.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from kagent_sandbox.data.build import Built
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Passed
from kagent_sandbox.device.table import own_unit
from kagent_sandbox.process.device_lock import DeviceLock, LockClosed

from kagent.config.settings import Config
from kagent.evolve.device_slot import DeviceSlot
from kagent.evolve.machine import TakesProfile
from kagent.fleet.fleet import LOCAL
from kagent.runs.events import Observer, Progress
from kagent.runs.lineage import Candidate
from kagent.runs.profiles import Profile, to_event
from kagent.runs.store import RunStore

LIMIT_S = 60.0
"""Wall clock of ncu for an incumbent: others wait for the device meanwhile."""


def profiling(
    task: Task, kind: Kind, config: Config, facts: DeviceFacts, *, limit_s: float = LIMIT_S
) -> TakesProfile | None:
    """Return what profiles an incumbent in a turn on this machine's device; None where kernels run
    on the CPU or on a cluster's nodes, or it is not wanted.
    """
    if not config.profile or kind != "gpu" or config.on != LOCAL:
        return None
    from kagent.evolve.profile import profile, worst_case  # prompts' templates take a while
    from kagent.prompting.hardware import hardware

    device = hardware(facts.target, facts, None)
    name = own_unit(kind)

    works = True

    def take(candidate: Candidate, built: Built, stopped: threading.Event) -> Profile | None:
        nonlocal works
        if not works:
            return None
        with DeviceLock(name, closed=stopped).turn("timing"):
            found = profile(
                *(candidate, task, worst_case(candidate), built, device),
                limit_s=limit_s,
                stopped=stopped,
            )
        works = not found.why_static or stopped.is_set()
        return found

    return take


class IncumbentProfiles:
    """Profiles the incumbents of a session, one at a time.

    Args:
        take: Takes one; None: none is taken.
        slot: Turns on the device.
        store: Of the run.
        observe: Is told of each, and why there are none.
        found: Profiles of the run; those that are taken are added.
    """

    def __init__(
        self,
        take: TakesProfile | None,
        slot: DeviceSlot,
        store: RunStore,
        observe: Observer,
        found: list[Profile],
    ) -> None:
        self._take = take
        self._slot = slot
        self._store = store
        self._observe = observe
        self._found = found
        self._seen = {p.candidate for p in found if not p.why_static}
        self._wanted: tuple[Candidate, Built] | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopped = threading.Event()
        self._thread = ThreadPoolExecutor(1, "profile")

    def want(self, candidate: Candidate, built: Built) -> None:
        """Profile an incumbent when the device is free, unless that was done. Returns at once."""
        timed = isinstance(candidate.verdict, Passed) and candidate.verdict.timings
        if self._take is None or candidate.id in self._seen or not timed:
            return
        self._wanted = (candidate, built)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work(self._take), name="profile")

    async def finish(self) -> None:
        """Wait for the last incumbent's."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def cancel(self) -> None:
        """End what is in progress, ncu included, and begin nothing more."""
        self._take = self._wanted = None
        self._stopped.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    async def _work(self, take: TakesProfile) -> None:
        loop = asyncio.get_running_loop()
        while self._wanted is not None:
            async with self._slot.spare():
                (candidate, built), self._wanted = self._wanted, None
                self._seen.add(candidate.id)
                try:
                    profile = await loop.run_in_executor(
                        self._thread, take, candidate, built, self._stopped
                    )
                except LockClosed:
                    return
                except Exception as e:  # noqa: BLE001 - no reason to end a search
                    self._refuse(str(e))
                    return
            if profile is None or self._stopped.is_set():
                self._take = None
                return
            self._keep(profile)

    def _keep(self, profile: Profile) -> None:
        if profile not in self._found:  # the reason of an earlier session may be the same
            self._store.append("profiled", to_event(profile))
            self._found.append(profile)
        if profile.why_static:
            self._refuse(profile.why_static)
        else:
            case, number = profile.case, profile.candidate
            self._observe(Progress(f"ncu has counted what #{number} does on {case}"))

    def _refuse(self, why: str) -> None:
        self._take = self._wanted = None
        self._observe(Progress(f"no counters of kernels in this session: {why}"))
