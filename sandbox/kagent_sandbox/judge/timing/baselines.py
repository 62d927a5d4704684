"""Baselines: torch eager, torch.compile and expert libraries, timed like candidates, once per
device, versions and task.

They run in a trusted process of their own, which is restarted when a baseline takes it down. A
baseline that fails is recorded with its reason. One whose process dies is tried once more, without
what torch compiled before: without it, torch's best might be slower than it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Self

from kagent_sandbox import cache
from kagent_sandbox.data.build import ScalarSpec, TensorSpec
from kagent_sandbox.data.build_case import build_case, strides_of
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.race import TORCH
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import Task
from kagent_sandbox.device import interference
from kagent_sandbox.device.baseline_calls import AHEAD, BaselineCall, all_names
from kagent_sandbox.device.table import find_device
from kagent_sandbox.errors import ChildDied, DeviceFull
from kagent_sandbox.judge.timing.noise import Noise
from kagent_sandbox.process.environment import for_trusted, passed
from kagent_sandbox.runtime.text import printable

VERSION = 1
"""Version of the way of measuring, with the clock's own version: part of the cache's key."""
MOST_AGE_S = 24 * 3600.0
"""Stored times that are older are measured again."""
ITEM_LIMIT_S = 900.0  # one baseline of one case; max-autotune of a large product takes minutes
_WORKER: tuple[str, ...] = ("-m", "kagent_sandbox.judge.timing.baseline_worker")
_SEED = 20  # of baselines' inputs: never those of a candidate
_FIELDS = ("name", "dtype", "inputs", "scale", "noncontiguous")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Baselines:
    """Times of all baselines: case -> baseline -> µs, and what else was seen."""

    us: Mapping[str, Mapping[str, float]]
    peak_bytes: Mapping[str, Mapping[str, int]]  # on a GPU; 0 on a CPU
    captured: Mapping[str, Mapping[str, bool]]  # replayed as a CUDA graph rather than called
    failed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # reason
    measured_at: float = 0.0  # seconds since the epoch; 0: not known
    noise: Noise = field(default_factory=Noise)  # of the machine, by the A/A test just before
    state: Mapping[str, float] = field(default_factory=dict)  # of the host then: see `host_state`

    def fastest(self, case: str) -> tuple[str, float]:
        """Name and µs of the fastest of eager and the torch.compile modes.

        Raises:
            KeyError: None of them ran in this case.
        """
        torch_us = {n: us for n, us in self.us[case].items() if n in TORCH}
        if not torch_us:
            raise KeyError(f"no baseline of torch ran in case {case}: {self.failed.get(case)}")
        name = min(torch_us, key=lambda n: torch_us[n])
        return name, torch_us[name]

    @property
    def fastest_us(self) -> dict[str, float]:
        """µs of the fastest of eager and the torch.compile modes, per case that has one."""
        found = {}
        for case, times in self.us.items():
            if any(n in TORCH for n in times):
                found[case] = self.fastest(case)[1]
        return found


def measure_baselines(
    task: Task,
    device: str,
    facts: DeviceFacts,
    on_progress: Progress | None = None,
    *,
    cases: Sequence[Case] | None = None,
    names: Collection[str] | None = None,
    index: int = 0,
    cached: bool = True,
    noise: Noise | None = None,
    worker: BaselineWorker | None = None,
) -> Baselines:
    """Baselines of a task's visible benchmark cases (or of `cases`) on a device.

    Args:
        task: The task.
        device: Its name (`kagent_sandbox.device.table`).
        facts: Of the device: what is unique to it is part of the cache's key.
        on_progress: Is told one line per baseline.
        cases: Other cases than the visible benchmark ones; not cached.
        names: Of the baselines that are wanted, if not all.
        index: Which of several.
        cached: Whether earlier measurements are used, while they are of the last 24 h and the
            machine is as noisy as it was.
        noise: Of the machine now; None: unknown, and not compared.
        worker: Process that was started ahead, and is the caller's to close.

    Raises:
        ChildDied: The measuring process does not start.
        DeviceFull: A baseline lacked memory that others may hold.
        TaskError: A case does not fit the task.
    """
    say = on_progress or (lambda _: None)
    name = _stored_name(task, device, facts, names)
    if cached and cases is None:
        known = cache.load(name, Baselines)
        why = None if known is None else _outdated(known, noise)
        if known is not None and why is None:
            since = age_text(time.time() - known.measured_at)
            say(f"baselines were measured {since} ago on this machine, as noisy as now")
            return known
        if why is not None:
            say(f"baselines are measured again: {why}")
    chosen = list(task.cases(facts.kind).bench) if cases is None else list(cases)
    calls = [baseline_call(task, case, "", _SEED) for case in chosen]
    collected, state = _Collected(say, names), host_state()
    while not collected.complete:
        try:
            _run_worker(device, index, calls, collected, worker)
        except ChildDied:  # one that was started ahead may have died of what others did meanwhile
            if worker is None:
                raise
        worker = None
    measured = replace(
        collected.baselines([c.name for c in chosen]),
        measured_at=time.time(),
        noise=noise or Noise(),
        state=state,
    )
    if cases is None:
        cache.save(name, measured)
    return measured


def stored_baselines(task: Task, device: str, facts: DeviceFacts) -> Baselines | None:
    """Earlier measurements that `measure_baselines` returns, unless the machine's noise changed."""
    known = cache.load(_stored_name(task, device, facts, None), Baselines)
    return known if known is not None and _outdated(known, None) is None else None


def _stored_name(task: Task, device: str, facts: DeviceFacts, names: Collection[str] | None) -> str:
    clock = find_device(device).timing_version()
    parts = (*facts.unique, task.name, task.digest, device, VERSION, clock, *(names or ()))
    return cache.named("baselines", *parts, *sorted(passed().items()))


def _outdated(known: Baselines, noise: Noise | None) -> str | None:
    """Reason why stored times are not used, or None."""
    age_s = time.time() - known.measured_at
    if not 0 <= age_s <= MOST_AGE_S:
        when = f"{age_text(age_s)} ago" if known.measured_at and age_s > 0 else "at an unknown time"
        return f"the stored ones were measured {when}"
    return (known.noise.change(noise) or None) if noise is not None else None


def age_text(seconds: float) -> str:
    """'40 s', '25 min', '7 h' or '3 days'."""
    for unit, most, length in (("s", 90, 1), ("min", 90 * 60, 60), ("h", 48 * 3600, 3600)):
        if seconds < most:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def host_state() -> Mapping[str, float]:
    """The host as times are taken: runnable threads in the last minute, the fastest core's MHz."""
    state = {"load_average": os.getloadavg()[0]}
    clocks = interference.read_host().core_mhz
    return state | ({"core_mhz": max(clocks)} if clocks else {})


def baseline_names(task: Task, modes: Sequence[str]) -> list[str]:
    """All baselines of a task that can be tried here: eager, these compile modes, experts."""
    return all_names(str(task.folder / "reference.py"), modes)


def baseline_call(task: Task, case: Case, name: str, seed: int) -> BaselineCall:
    """A baseline of a task on one case, as plain data for another process."""
    built = build_case(task, case)
    tensors = [a for a in built.arguments if isinstance(a, TensorSpec)]
    return BaselineCall(
        name=name,
        reference=str(task.folder / "reference.py"),
        case={f: getattr(case, f) for f in _FIELDS},
        dims=case.dims,
        scalars={a.name: a.value for a in built.arguments if isinstance(a, ScalarSpec)},
        seed=seed,
        strides={a.name: a.strides for a in tensors if a.strides != strides_of(a.shape)},
    )


class _Collected:
    """Answers of the workers so far."""

    def __init__(self, say: Progress, names: Collection[str] | None) -> None:
        self.complete = False
        self.names = names  # of the baselines that are wanted; None: all
        self._say = say
        self._done: list[dict[str, object]] = []
        self._running: tuple[str, str] | None = None
        self._ends = False  # whether the worker measures nothing further
        self._died: dict[tuple[str, str], str] = {}  # how the process ended

    @property
    def again(self) -> bool:
        """Whether one is to be tried again, whose process died."""
        tried = {(str(c), str(n)) for c, n in self.skip}
        return not tried.issuperset(self._died)

    @property
    def skip(self) -> list[Any]:
        """Names that need not be measured again."""
        return [a.get("done") or a.get("failed") for a in self._done]

    def take(self, line: str) -> None:
        """One answer of the worker.

        Raises:
            DeviceFull: A baseline lacked memory that others may hold: without it, torch's best
                would be slower than it is.
        """
        answer = json.loads(line)
        if "complete" in answer:
            self.complete = True
            return
        if "start" in answer:
            self._running = (answer["start"][0], answer["start"][1])
            return
        self._running = None
        self._ends = bool(answer.get("last"))
        if "full" in answer:
            raise DeviceFull(f"{answer['full'][0]}: {answer['full'][1]}: {answer['reason']}")
        self._done.append(answer)
        case, name = answer.get("done") or answer["failed"]
        if "done" in answer:
            how = ", captured" if answer["captured"] else ""
            self._say(f"{case}: {name} {answer['us']:.1f} µs{how}")
        else:
            self._say(f"{case}: {name} failed: {answer['reason']}")

    def died(self, reason: str, log: str, *, final: bool = False) -> None:
        """The worker is gone; what it was doing has failed, unless it is to be tried again. Another
        one goes on.

        Raises:
            ChildDied: It was doing nothing: it would die again.
        """
        if self._ends:
            self._ends = False
            return
        if self._running is None:
            raise ChildDied(f"the process that measures baselines {reason}\n{log}")
        case, name = self._running
        if not final:
            if self._running not in self._died:
                self._died[self._running] = reason
                self._running = None
                self._say(f"{case}: {name}: its process {reason}; once more")
                return
            same = reason == self._died[self._running]
            reason += ", twice" if same else f", and before it {self._died[self._running]}"
        self.take(json.dumps({"failed": [case, name], "reason": f"its process {reason}"}))

    def baselines(self, cases: Sequence[str]) -> Baselines:
        """All answers, by case."""
        us: dict[str, dict[str, float]] = {c: {} for c in cases}
        peak: dict[str, dict[str, int]] = {c: {} for c in cases}
        captured: dict[str, dict[str, bool]] = {c: {} for c in cases}
        failed: dict[str, dict[str, str]] = {c: {} for c in cases}
        for answer in self._done:
            pair = answer.get("done") or answer.get("failed")
            assert isinstance(pair, list)
            case, name = pair
            if "done" in answer:
                us[case][name] = float(str(answer["us"]))
                peak[case][name] = int(str(answer["peak_bytes"]))
                captured[case][name] = bool(answer["captured"])
            else:
                failed[case][name] = str(answer["reason"])
        return Baselines(us, peak, captured, {c: f for c, f in failed.items() if f})


class BaselineWorker:
    """The process that measures, which waits for what it is to measure.

    Args:
        device: Name of the device (`kagent_sandbox.device.table`).
        folder: Of what torch compiles.
        ahead: Whether the request comes later, and the compiler is imported meanwhile.
    """

    def __init__(self, device: str, folder: Path, *, ahead: bool) -> None:
        environment = {
            **for_trusted(),
            **find_device(device).environment,
            "TORCHINDUCTOR_CACHE_DIR": str(folder),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            # Memory is kept between calls, like a GPU's allocator does: candidates are timed on
            # memory that exists, so baselines must not pay for page faults either.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        }
        self._closed = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, *_WORKER, *((AHEAD,) if ahead else ())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,  # a Ctrl-C at the terminal is the caller's to handle
        )

    @classmethod
    def ahead(cls, device: str) -> Self:
        """A process that is asked later, by `measure_baselines`."""
        return cls(device, cache.compiled_folder(), ahead=True)

    def measure(self, request: Mapping[str, object], collected: _Collected) -> None:
        """Run it until it is through, or gone, or takes too long over one baseline."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self:
            with contextlib.suppress(BrokenPipeError):  # it died at once: its status says of what
                self._process.stdin.write(json.dumps(request))
                self._process.stdin.close()
            in_time = _read_lines(self._process.stdout, collected)
            if collected.complete:
                return
            if in_time:
                self._process.wait()
            status = self._process.returncode
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
            tail = printable(self._log.read().decode(errors="replace")).strip()
        if not in_time:
            collected.died(f"took longer than {ITEM_LIMIT_S:.0f} s", tail, final=True)
        elif status < 0:
            collected.died(f"died of {signal.Signals(-status).name}", tail)
        else:
            collected.died(f"exited with status {status}", tail)

    def close(self) -> None:
        """End the process, and the compiler's that it has started."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            with contextlib.suppress(OSError):  # its end is gone, and so is what was to be written
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _run_worker(
    device: str,
    index: int,
    calls: Sequence[BaselineCall],
    collected: _Collected,
    worker: BaselineWorker | None,
) -> None:
    """Have one worker measure what is left, `worker` if there is one."""
    request = {
        "device": device,
        "index": index,
        "calls": [to_json(c) for c in calls],
        "skip": collected.skip,
        "names": None if collected.names is None else list(collected.names),
    }
    with contextlib.ExitStack() as stack:
        if worker is None:
            folder = cache.compiled_folder()
            if collected.again:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kagent-")))
            worker = BaselineWorker(device, folder, ahead=False)
        worker.measure(request, collected)


def _read_lines(stream: IO[str], collected: _Collected) -> bool:
    """Take answers up to the last one, or the stream's end; False when one did not come in time."""
    descriptor = stream.fileno()
    os.set_blocking(descriptor, False)
    rest = b""
    deadline = time.monotonic() + ITEM_LIMIT_S
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            data = os.read(descriptor, 1 << 16)
            if not data:
                return True
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                collected.take(line.decode())
                deadline = time.monotonic() + ITEM_LIMIT_S
            if collected.complete:
                return True
    return False
