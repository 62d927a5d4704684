"""Certification: an exported library is checked and measured again on this machine.

Correctness is judged as on the first day. Times are compared with those of the same model of
device, on the visible benchmark cases. A case is a regression if its kernel takes longer than
before, beyond both intervals and the slack below, and has lost ground against torch as well. (If
torch became slower by as much, the machine is to blame.) It is also one if eager torch, slower
before, is now faster. A regression is measured once more, and counts if it shows again.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.race import EAGER
from kagent_sandbox.data.task import Task, load_task
from kagent_sandbox.data.verdict import Comparison, SpeedVerdict
from kagent_sandbox.errors import TaskError, UserError

from kagent.export.dispatch_table import gain
from kagent.export.host import ExportHost
from kagent.export.measuring import (
    LibraryEntrant,
    LibraryTimes,
    Measurement,
    Say,
)
from kagent.export.own_tests import failure_of
from kagent.export.packaging import without_tests_of
from kagent.export.reading import PACKAGES, OnDisk, kinds_of, no_device_text
from kagent.export.record import (
    TORCH,
    DeviceRecord,
    KernelRecord,
    LibraryRecord,
    OperatorRecord,
    PointRecord,
)

SLACK = {"gpu": 0.02, "cpu": 0.10}
"""Share by which a time may grow from one day to another without being called a regression."""

Change = Literal["as then", "faster", "slower", "torch is faster now", "not comparable"]


@dataclass(frozen=True, slots=True)
class Line:
    """One measured case: then and now."""

    operator: str
    case: str
    kernel: str
    now_us: float
    now_gain: float | None  # time of torch / its own
    then_us: float | None
    then_gain: float | None
    change: Change
    verdict: SpeedVerdict | None = None  # now, beside the best of torch
    then_verdict: SpeedVerdict | None = None

    @property
    def worse(self) -> bool:
        """Whether it is a regression."""
        return self.change in ("slower", "torch is faster now")


@dataclass(frozen=True, slots=True)
class Shapes:
    """Visible benchmark cases of the library: how many there are, and what they are to it here."""

    visible: int = 0
    compared: int = 0  # with the times that the library has for this device
    torch: int = 0  # the library uses torch there, so no kernel is compared

    def __add__(self, other: Shapes) -> Shapes:
        return Shapes(
            self.visible + other.visible, self.compared + other.compared, self.torch + other.torch
        )


@dataclass(frozen=True)
class Certificate:
    """The outcome of a certification.

    `hidden` is each correct kernel beside the best of torch, over hidden cases drawn now: other
    ones each time, so that they are compared with none of then.
    """

    device: str
    checked: tuple[str, ...]  # ids of the kernels that are correct here
    wrong: dict[str, str]  # kernel -> what is wrong
    lines: tuple[Line, ...]
    changed: tuple[str, ...]  # files that are not as they were written
    skipped: dict[str, str]  # kernel -> why it cannot be judged on this machine
    tests: str = ""  # failure of the library's own tests
    shapes: Shapes = Shapes()
    hidden: Mapping[str, Comparison] = field(default_factory=dict)

    @property
    def regressions(self) -> list[Line]:
        """Cases that got worse."""
        return [line for line in self.lines if line.worse]

    @property
    def ok(self) -> bool:
        """Whether the library is what its provenance says, here."""
        faults = self.wrong or self.changed or self.regressions or self.tests
        return bool(self.checked) and not faults


def certify(
    disk: OnDisk, host: ExportHost, say: Say, names: Sequence[str] = ()
) -> tuple[Certificate, list[tuple[OperatorRecord, LibraryTimes]]]:
    """Judge every kernel that a host has the device for, and run the library's own tests.

    Args:
        disk: The library.
        host: Where to judge them.
        say: Function that receives lines of progress.
        names: Tasks of the operators to judge; () is all of them. Only their own tests run.

    Returns:
        The outcome, and the new times of each operator.

    Raises:
        UserError: The library lacks such an operator, or the host has no device for any.
        TaskError: The task of every operator is refused.
        MachineError: The machine failed.
    """
    operators = chosen(disk.library, names)
    checked: list[str] = []
    wrong: dict[str, str] = {}
    lines: list[Line] = []
    skipped: dict[str, str] = {}
    wanted: list[tuple[OperatorRecord, list[KernelRecord], Kind]] = []
    for operator in operators:
        for kind in sorted(kinds_of(operator)):
            kernels = [k for k in operator.kernels if k.written_in.kind == kind]
            if host.has(kind):
                say(f"{operator.task}: {len(kernels)} kernel{'s'[: len(kernels) > 1]}")
                wanted.append((operator, kernels, kind))
            else:
                skipped |= {
                    k.id: f"needs an NVIDIA GPU, and {host.place} has none" for k in kernels
                }
    if not wanted:
        raise UserError(no_device_text(disk, host.place))
    sessions: list[tuple[OperatorRecord, LibraryTimes]] = []
    doubted: list[tuple[OperatorRecord, list[KernelRecord], Kind]] = []
    found = measure_each(wanted, host, say)
    for (operator, kernels, kind), measured in zip(wanted, found, strict=True):
        if isinstance(measured, TaskError):
            wrong |= {k.id: f"{operator.task}: {measured}" for k in kernels}
            continue
        sessions.append((operator, measured))
        right = [k for k in kernels if not measured.results[k.id].refused]
        checked += [k.id for k in right]
        wrong |= {k.id: why for k in kernels if (why := measured.results[k.id].refused)}
        now = list(compared(operator, measured.device))
        lines += now
        if any(line.worse for line in now):
            say(f"{operator.task}: slower than before? measuring once more")
            doubted.append((operator, right, kind))
    if not sessions:
        raise TaskError("; ".join(wrong.values()))
    for (operator, _, _), again in zip(doubted, measure_again(doubted, host, say), strict=True):
        lines = confirmed(lines, list(compared(operator, again.device)))
    device = sessions[-1][1].device.name
    changed = tuple(disk.changed())
    say("running the library's own tests")
    gpu = any(m.device.kind == "gpu" for _, m in sessions)
    without = [o.task for o in disk.library.operators if o not in operators]
    files = without_tests_of(without, disk.contents())
    tested = host.run_tests(disk.library.name, files, gpu=gpu, path=PACKAGES)
    tests = failure_of(disk.library.name, tested)
    whole = Certificate(
        device,
        tuple(checked),
        wrong,
        tuple(lines),
        changed,
        skipped,
        tests,
        sum((shapes_of(operator, m.device) for operator, m in sessions), Shapes()),
        {
            k: r.versus_torch
            for _, m in sessions
            for k, r in m.results.items()
            if not r.refused and r.versus_torch is not None
        },
    )
    return whole, sessions


def chosen(library: LibraryRecord, names: Sequence[str]) -> list[OperatorRecord]:
    """Operators of a library by their tasks' names; all of them if none are given.

    Raises:
        UserError: The library lacks one.
    """
    there = {o.task: o for o in library.operators}
    if missing := [n for n in names if n not in there]:
        raise UserError(
            f"{library.name} has no operator {', '.join(missing)}; it has {', '.join(there)}"
        )
    return [o for o in library.operators if not names or o.task in names]


def measure_each(
    wanted: Sequence[tuple[OperatorRecord, Sequence[KernelRecord], Kind]],
    host: ExportHost,
    say: Say,
) -> list[LibraryTimes | TaskError]:
    """`measure_again`, with an error in the place of an operator whose task is refused. If there is
    such a one, the others are measured one after the other.

    Raises:
        As `ExportHost.measure`, but for `TaskError`.
    """
    try:
        return [*measure_again(wanted, host, say)]
    except TaskError as e:
        if len(wanted) == 1:
            return [e]
    say("a task of the library is refused: one operator after the other")
    return [found for each in wanted for found in measure_each([each], host, say)]


def measure_again(
    wanted: Sequence[tuple[OperatorRecord, Sequence[KernelRecord], Kind]],
    host: ExportHost,
    say: Say,
) -> list[LibraryTimes]:
    """Verify and time operators' kernels for a kind of device, on the library's own copies of the
    tasks; on a GPU side by side.

    Raises:
        As `ExportHost.measure`; the text of a `TaskError` says that the task is the library's.
    """
    folder = Path(tempfile.mkdtemp(prefix="kagent-tasks-"))
    try:
        measurements = []
        for i, (operator, kernels, kind) in enumerate(wanted):
            (folder / str(i)).mkdir()
            entrants = [entrant_of(operator, k, kind) for k in kernels]
            task = restored_task(operator, folder / str(i))
            measurements.append(Measurement(task, kind, entrants))
        return host.measure(measurements, say)
    except TaskError as e:
        text = re.sub(rf"{re.escape(str(folder))}/\d+/", "", str(e))
        raise TaskError(
            f"this version of kagent refuses the task that the library has ({text}): export the "
            "operator again"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def restored_task(operator: OperatorRecord, folder: Path) -> Task:
    """The task as the library has it, in a folder of its own."""
    (folder / "task.toml").write_text(operator.task_toml, encoding="utf-8")
    (folder / "reference.py").write_text(operator.reference_py, encoding="utf-8")
    return load_task(folder)


def entrant_of(operator: OperatorRecord, kernel: KernelRecord, kind: Kind) -> LibraryEntrant:
    """A kernel of a library, with the configurations that it was measured with."""
    choice: dict[str, int] = {}
    for device in operator.devices:
        if device.kind == kind:
            choice |= {p.case: p.config[kernel.id] for p in device.points if kernel.id in p.config}
    return LibraryEntrant(kernel.id, kernel.source, len(kernel.configs), choice)


def _visible(device: DeviceRecord | None) -> dict[str, PointRecord]:
    """Visible cases by name. Hidden ones of one name are other shapes each time."""
    points = () if device is None else device.points
    return {p.case: p for p in points if not p.case.startswith("hidden")}


def _then(operator: OperatorRecord, now: DeviceRecord) -> dict[str, PointRecord]:
    return _visible(next((d for d in operator.devices if d.name == now.name), None))


def shapes_of(operator: OperatorRecord, now: DeviceRecord) -> Shapes:
    """Count an operator's visible cases: those of then on this device, else those of now."""
    before = _then(operator, now)
    visible = before or _visible(now)
    lines = [line for line in compared(operator, now) if line.case in before]
    used_torch = sum(p.best == TORCH for p in visible.values())
    return Shapes(len(visible), len(lines), used_torch)


def compared(operator: OperatorRecord, now: DeviceRecord) -> Iterator[Line]:
    """Every case in which a kernel is used, then and now."""
    before = _then(operator, now)
    for point in now.points:
        old = before.get(point.case)
        used = old.best if old is not None else point.best
        if used == TORCH or used not in point.times:
            continue
        yield Line(
            operator=operator.task,
            case=point.case,
            kernel=used,
            now_us=point.times[used].us,
            now_gain=gain(point, used),
            then_us=None if old is None else old.times[used].us,
            then_gain=None if old is None else gain(old, used),
            change=_change(old, point, used, SLACK[now.kind]) if old else "not comparable",
            verdict=point.verdicts.get(used),
            then_verdict=None if old is None else old.verdicts.get(used),
        )


def confirmed(first: Sequence[Line], second: Sequence[Line]) -> list[Line]:
    """The first measurement, where it found no regression, and the second one where it did."""
    again = {(line.operator, line.case): line for line in second}
    return [again.get((line.operator, line.case), line) if line.worse else line for line in first]


def _change(then: PointRecord, now: PointRecord, kernel: str, slack: float) -> Change:
    old, new = then.times[kernel], now.times[kernel]
    was_faster = EAGER not in then.times or old.us < then.times[EAGER].us
    eager = now.times.get(EAGER)
    if was_faster and eager is not None and new.low_us > eager.high_us * (1 + slack):
        return "torch is faster now"
    before, after = gain(then, kernel), gain(now, kernel)
    lost = before is None or after is None or after < before * (1 - slack)
    if new.low_us > old.high_us * (1 + slack) and lost:
        return "slower"
    return "faster" if new.high_us < old.low_us * (1 - slack) else "as then"
