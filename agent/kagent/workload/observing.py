"""Observation of a script's steps in its own process: times first, then operations.

Steps in order: warm-up; steps that are timed and not otherwise disturbed; as many under torch's
profiler, for kernels and compiled code; one that is recorded, with statistics of its tensors; and
as many that are recorded and profiled, for the time of each operation. Then the script ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any

import torch
from kagent_sandbox.device.interference import HostReading, host_notes, read_host
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from kagent.workload.recording import LABEL, OUTSIDE, Recording, StepRecorder, plain_path
from kagent.workload.region_code import region_source
from kagent.workload.regions import Region, key_of, place, regions_of, title, traffic
from kagent.workload.steps import Done, ScriptFailed, Steps, now_s, seed_all

_COMPILED = "Torch-Compiled Region"
_MARK = "kagent step "
"""Beginning of the profiler's name of a step's end; its index follows."""
_LEAST_STEPS = "it must run at least {needed} steps, and ended after {seen}"


def observe(request: Mapping[str, Any], run: Callable[[], None]) -> dict[str, Any]:
    """Run a script and describe its steps.

    Args:
        request: `warmup` and `steps` (numbers of steps), `kind` (of steps), `seed`.
        run: Runs the script.

    Returns:
        The description, as `hotspots.Observed` reads it.

    Raises:
        ScriptFailed: The script fails, or has too few steps.
    """
    observer = _Observer(request["warmup"], request["steps"])
    seed_all(request["seed"])
    with Steps(observer, request["kind"]) as steps:
        observer.in_optimizer = lambda: steps.in_optimizer
        run()
    observer.close()
    if not observer.finished:
        raise ScriptFailed(_too_few(steps.seen, observer.needed))
    return observer.result()


def _too_few(seen: int, needed: int) -> str:
    if seen == 0:
        return (
            "no step was seen: a step ends with optimizer.step(), or with a call of the outermost "
            "module without gradients. Where a script trains without a torch.optim.Optimizer, "
            "give --step call"
        )
    return f"{_LEAST_STEPS.format(needed=needed, seen=seen)}: give --steps or --warmup less"


class _Observer:
    """Takes each step its turn.

    The profiler starts where a step ends and stops when the script has ended: an optimizer's hooks
    run inside of an event of its own, and a profiler that stops there takes the process with it.
    """

    def __init__(self, warmup: int, steps: int) -> None:
        self.in_optimizer: Callable[[], bool] = lambda: False
        self.finished = False
        self._plan = ["warm"] * (warmup + 1)  # step 0 has the script's beginning in it
        self._plan += [*["time"] * steps, *["trace"] * steps, "record", *["profile"] * steps]
        self.needed = len(self._plan)
        self._steps = steps
        self._recorder: StepRecorder | None = None
        self._profile: Any = None
        self._begun_s = 0.0
        self.step_us: list[float] = []
        self._host: tuple[HostReading, HostReading] | None = None  # when times began and ended
        self._sampled: Recording | None = None
        self._recorded: list[Recording] = []
        self._trains = False

    # -- Observer ----------------------------------------------------------------------------------

    def call_begins(self) -> None:
        """Go on recording: `torch.inference_mode` around the last call has ended it."""
        if self._recorder is not None:
            self._recorder.resume()

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Nothing is to be done before it steps."""

    def step_ends(self, index: int, optimizer: torch.optim.Optimizer | None, output: Any) -> None:
        """End what the step was for; begin what the next one is for."""
        del output
        self._trains = optimizer is not None
        end_s = now_s()
        self._end(self._plan[index], end_s)
        if index + 1 == len(self._plan):
            self.finished = True
            self._mark(index)
            raise Done
        following = self._plan[index + 1]
        if "time" in (self._plan[index], following):
            host = read_host()
            self._host = (host if self._host is None else self._host[0], host)
        if following == "trace" and self._profile is None:
            self._profile = _profiler()
            self._profile.__enter__()
        self._mark(index)
        if following in ("record", "profile"):
            self._recorder = StepRecorder(self.in_optimizer, statistics=following == "record")
            self._recorder.__enter__()
        self._begun_s = now_s()

    def _end(self, ended: str, end_s: float) -> None:
        if ended == "time":
            self.step_us.append((end_s - self._begun_s) * 1e6)
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
            if ended == "record":
                self._sampled = self._recorder.recording
            else:
                self._recorded.append(self._recorder.recording)
            self._recorder = None

    def _mark(self, index: int) -> None:
        if self._profile is not None:
            with record_function(f"{_MARK}{index}"):
                pass

    def close(self) -> None:
        """End what is still open after the script."""
        if self._recorder is not None:
            self._recorder.__exit__(None, None, None)
        if self._profile is not None:
            self._profile.__exit__(None, None, None)

    # -- the result --------------------------------------------------------------------------------

    def result(self) -> dict[str, Any]:
        """Observations per step."""
        steps, events = self._steps, list(self._profile.events())
        ends = {
            int(e.name.removeprefix(_MARK)): e.time_range.end
            for e in events
            if e.name.startswith(_MARK) and e.device_type == DeviceType.CPU
        }
        first = self._plan.index("trace") - 1
        trace = _Trace(e for e in events if ends[first] <= e.time_range.start < ends[first + steps])
        found = _Regions(self._sampled)
        for i, recording in enumerate(self._recorded, self._plan.index("profile")):
            here = (e for e in events if ends[i - 1] <= e.time_range.start < ends[i])
            found.add(recording, _op_times_us(here), steps)
        gpu = bool(trace.launches)
        return {
            "device": "gpu" if gpu else "cpu",
            "trains": self._trains,
            "step_us": median(self.step_us),
            "steps_us": self.step_us,
            "disturbed": host_notes(*self._host) if self._host is not None else [],
            "busy_us": trace.busy_us / steps if gpu else None,
            "launches": trace.launches / steps if gpu else None,
            "compiled_us": trace.compiled_us / steps,
            "compiled_frames": _compiled_frames(),
            "kernels": {name: us / steps for name, us in trace.kernels.most_common()},
            "regions": found.listed(),
        }


class _Trace:
    """Kernels and compiled code of steps that were not recorded."""

    def __init__(self, events: Iterable[Any]) -> None:
        self.kernels: Counter[str] = Counter()
        self.launches = 0
        self.compiled_us = 0.0
        spans: list[tuple[float, float]] = []
        for event in events:
            if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
                span = event.time_range
                spans.append((span.start, span.end))
                self.kernels[event.name] += span.end - span.start
                self.launches += 1
            elif event.name.startswith(_COMPILED):
                self.compiled_us += event.cpu_time_total
        self.busy_us = _union_us(spans)


class _Regions:
    """Regions of several recordings of a step, added up by key."""

    def __init__(self, sampled: Recording | None) -> None:
        self._found: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, tuple[Region, Recording]] = {}
        if sampled is not None:
            for region in regions_of(sampled):
                self._samples.setdefault(key_of(region, sampled.ops), (region, sampled))

    def add(self, recording: Recording, times_us: Mapping[int, float], steps: int) -> None:
        for region in regions_of(recording):
            key = key_of(region, recording.ops)
            entry = self._found.get(key)
            if entry is None:
                entry = self._found[key] = self._entry(key, region, recording)
            us = sum(times_us.get(i, 0.0) for i in region.ops) / steps
            entry["us"] += us
            entry["count"] += 1 / steps
            entry["modules"][_where(region, recording)] += us

    def _entry(self, key: str, region: Region, recording: Recording) -> dict[str, Any]:
        ops = recording.ops
        read, written = traffic(region, ops)
        sample, source = self._samples.get(key, (region, recording))
        flops: defaultdict[str, float] = defaultdict(float)
        for i in region.ops:
            if ops[i].flops:
                flops[next((v.dtype for v in ops[i].reads), "float32")] += ops[i].flops
        return {
            "key": key,
            "kind": region.kind,
            "title": title(region, ops),
            "place": place(region),
            "phase": region.phase,
            "ops": sum(not ops[i].is_view for i in region.ops),
            "inputs": [f"{v.dtype}{list(v.shape)}" for v in region.inputs],
            "outputs": [f"{v.dtype}{list(v.shape)}" for v in region.outputs],
            "read_bytes": read,
            "written_bytes": written,
            "flops": dict(flops),
            "us": 0.0,
            "count": 0.0,
            "modules": Counter(),
            "source": region_source(sample, source),
        }

    def listed(self) -> list[dict[str, Any]]:
        found = list(self._found.values())
        for entry in found:
            entry["modules"] = dict(entry["modules"].most_common())
            entry["count"] = max(1, round(entry["count"]))
        return found


def _where(region: Region, recording: Recording) -> str:
    """The module's full path, for the icicle."""
    first = recording.ops[region.ops[0]].module
    return place(region) if first == OUTSIDE or region.kind == "fused" else plain_path(first)


def _profiler() -> Any:
    activities = [ProfilerActivity.CPU]
    if _on_gpu():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def _op_times_us(events: Iterable[Any]) -> dict[int, float]:
    """Time of each recorded operation: of its kernels on a GPU, else on the CPU."""
    found: dict[int, float] = {}
    gpu = _on_gpu()
    for event in events:
        if event.device_type == DeviceType.CPU and event.name.startswith(LABEL):
            children = event.cpu_children
            us = _kernel_times_us(event) if gpu else (c.cpu_time_total for c in children)
            found[int(event.name.removeprefix(LABEL))] = sum(us)
    return found


def _on_gpu() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _kernel_times_us(event: Any) -> Iterable[float]:
    yield from (k.duration for k in event.kernels)
    for child in event.cpu_children:
        yield from _kernel_times_us(child)


def _union_us(spans: list[tuple[float, float]]) -> float:
    """Time in which at least one of the spans runs."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


def _compiled_frames() -> int:
    """Functions that torch.compile has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["ok"])
