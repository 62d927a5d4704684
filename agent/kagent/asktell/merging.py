"""Merge of a run's copy that was judged elsewhere: adds the copy's new events to the run.

The copy's log begins like the run's. Its further events are added in their order: verdicts,
baselines, the race, and asks and answers of its own if they do not clash with new ones of the run.
Two verdicts for one candidate do clash. Kernels that were joined there give way to answers that
came here. All new events are committed at once, or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from kagent_sandbox.errors import RunError, UserError

from kagent.runs.files import clear_errors, write_file
from kagent.runs.history import History
from kagent.runs.lineage import Operator
from kagent.runs.manifest import identity
from kagent.runs.store import RunStore
from kagent.runs.stored_event import DAMAGE, StoredEvent

Key: TypeAlias = tuple[float, str, str]


@dataclass(frozen=True, slots=True)
class Merged:
    """Result of a merge: ids of candidates with a verdict now, and of those that are new."""

    verdicts: tuple[int, ...]
    accepted: tuple[int, ...]
    asks: tuple[int, ...]
    race: bool
    events: int  # 0: all was here already


def merge(home: Path, copy: Path) -> Merged:
    """Add to a run the events that its copy has beyond it.

    Args:
        home: Folder of the run.
        copy: Folder of the copy.

    Raises:
        UserError: The two are one folder, or not of one run.
        RunError: They contradict each other; nothing was changed. Or a folder cannot be used.
    """
    if home.resolve() == copy.resolve():
        raise UserError(f"{copy}: is the run itself: name the copy that was judged elsewhere")
    with RunStore.open(home) as ours, RunStore.open(copy, write=False) as theirs:
        run, other = identity(home, ours.manifest), identity(copy, theirs.manifest)
        if run != other:
            raise UserError(
                f"{copy}: a run of its own ({theirs.manifest.task}, {other}), no copy of {home} "
                f"({ours.manifest.task}, {run})"
            )
        news = _News(home, copy, ours.history())
        for event in theirs.history().events:
            try:
                news.take(event)
            except DAMAGE as e:
                raise RunError(f"{copy}: event {event.seq} is damaged: {e}") from None
        _copy_files(news, theirs, ours)
        if news.events:
            ours.adopt(news.events)
    return Merged(
        tuple(news.verdicts),
        tuple(news.accepted),
        tuple(news.asks),
        any(e.kind == "race" for e in news.events),
        len(news.events),
    )


@dataclass
class _News:
    """Events of the copy that are not here, and whether they fit."""

    home: Path
    copy: Path
    history: History
    events: list[StoredEvent] = field(default_factory=list)
    verdicts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    asks: list[int] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)  # kernels joined there, where answers came here

    def __post_init__(self) -> None:
        self._known = {_key(e) for e in self.history.events}
        self._proposals = {e.data["id"]: e.data for e in self._ours("proposed")}
        self._asks = {e.data["number"]: e.data for e in self._ours("asked")}
        self._judged = len(self.history.lineage)
        self._machine = next((e.data for e in self._ours("machine")), None)

    def _ours(self, kind: str) -> Iterable[StoredEvent]:
        return (e for e in self.history.events if e.kind == kind)

    def take(self, event: StoredEvent) -> None:
        """The copy's next event.

        Raises:
            RunError: It contradicts what is here.
        """
        if _key(event) not in self._known and self._is_new(event):
            self.events.append(event)

    def _is_new(self, event: StoredEvent) -> bool:
        data = event.data
        match event.kind:
            case "recorded":
                return self._verdict(data["id"])
            case "proposed":
                return self._proposal(data["id"], event)
            case "asked":
                return self._ask(data["number"], event)
            case "told" | "looked":
                return data["id"] in self.accepted
            case "timed":  # before its verdict, which is refused where there is one already
                return data["id"] >= self._judged and data["id"] not in self.left_out
            case "profiled":
                return data["candidate"] not in self.left_out
            case "prompted" | "call":
                return data["ask"] in self.asks
            case "machine":
                return self._device(event)
            case "race":
                return not self.left_out
            case _:
                return True

    def _verdict(self, number: int) -> bool:
        if number in self.left_out:
            return False
        if number != self._judged:
            raise self._clash(
                f"candidate {number} was judged in both, and only one measurement can count"
            )
        self._judged += 1
        self.verdicts.append(number)
        return True

    def _proposal(self, number: int, event: StoredEvent) -> bool:
        ours = self._proposals.get(number)
        if ours is None and number == len(self._proposals) and not self.left_out:
            self._proposals[number] = event.data
            self.accepted.append(number)
            return True
        if ours is None or any(ours[n] != event.data[n] for n in ("kernel", "ask", "fault")):
            if event.data["operator"] == Operator.RECOMBINE and event.data["ask"] is None:
                self.left_out.add(number)  # nobody's work: it is joined again where it pays
                return False
            raise self._clash(f"candidate {number} is another kernel in each")
        return False

    def _ask(self, number: int, event: StoredEvent) -> bool:
        ours = self._asks.get(number)
        if ours is None and number == len(self._asks):
            self._asks[number] = event.data
            self.asks.append(number)
            return True
        if ours != event.data:
            raise self._clash(f"ask {number} is another decision in each")
        return False

    def _device(self, event: StoredEvent) -> bool:
        if self._machine is None:
            self._machine = event.data
            return True
        ours, theirs = (d["environment"].get("key") for d in (self._machine, event.data))
        if ours != theirs:
            raise self._clash(
                f"one was measured on {ours}, the other on {theirs}, and their times do not compare"
            )
        return False

    def _clash(self, what: str) -> RunError:
        return RunError(
            f"{self.copy} and {self.home} contradict each other: {what}. Nothing was changed"
        )


def _key(event: StoredEvent) -> Key:
    return event.at, event.kind, json.dumps(event.data, sort_keys=True)


def _copy_files(news: _News, theirs: RunStore, ours: RunStore) -> None:
    """Texts of what is new, before any event names them. A file that is here stays as it is, but
    for a kernel that is not what its name says, as a full disk leaves it.
    """
    proposed = [e.data for e in news.events if e.kind == "proposed"]
    kernels = {theirs.kernel_path(p["kernel"]) for p in proposed}
    tuned = [e.data.get("tuned") for e in news.events if e.kind == "recorded"]
    kernels |= {theirs.kernel_path(kernel) for kernel in tuned if kernel}
    wanted = [*kernels]
    answered = {p["ask"] for p in proposed if p.get("ask") is not None}
    for kind, asks in (("prompts", news.asks), ("replies", answered.union(news.asks))):
        folder = theirs.folder / kind
        wanted += [p for n in asks for p in folder.glob(f"{n:04}*.md")]
    wanted += [theirs.folder / "logs" / f"{n}.txt" for n in news.verdicts]
    with clear_errors(ours.folder):
        for path in wanted:
            place = ours.folder / path.relative_to(theirs.folder)
            if path.resolve() != theirs.folder.resolve() / path.relative_to(theirs.folder):
                raise RunError(f"{path}: a link to somewhere else. Nothing was changed")
            if not path.is_file():
                continue
            text = path.read_bytes()
            if not place.exists() or (path in kernels and place.read_bytes() != text):
                place.parent.mkdir(exist_ok=True)
                write_file(place, text)
