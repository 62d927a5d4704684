"""Outcome of a selftest of the whole corpus, kept in the user's cache and shown with later runs.

A record belongs to one device, one set of versions and one corpus: after a change of any of them
the selftest has not been run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox import cache
from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.judge.timing.noise import Noise

from kagent.resources import corpus_folder

NOT_RUN = "not run"
_TEXTS = (".py", ".edits", ".toml")


@dataclass(frozen=True, slots=True)
class SelftestRecord:
    """The outcome of a whole selftest on one device."""

    digest: str  # of the corpus's texts, the versions and every outcome
    device: str
    tier: str
    when: str  # local time, ISO 8601
    ran: int  # candidates, scenarios and checks of the machine
    skipped: int  # for want of a GPU
    missed: tuple[str, ...]  # ids of entries, names of checks
    noise: Noise | None = None  # of the device, then: every run measures its own

    @property
    def text(self) -> str:
        """One line."""
        head = f"{self.ran - len(self.missed)} of {self.ran} as expected"
        if self.missed:
            more = f" and {len(self.missed) - 3} more" if len(self.missed) > 3 else ""
            head += f" (missed: {', '.join(self.missed[:3])}{more})"
        if self.skipped:
            head += f", {self.skipped} skipped"
        return f"{head}; {self.when[:10]}, tier {self.tier}, digest {self.digest}"


def corpus_hash(corpus: Path | None = None) -> str:
    """Hash of all texts of the corpus, by their paths."""
    folder = corpus or corpus_folder()
    files = sorted(p for p in folder.rglob("*") if p.suffix in _TEXTS and p.is_file())
    hashed = hashlib.sha256()
    for path in files:
        text = path.read_bytes()
        hashed.update(f"{path.relative_to(folder).as_posix()}\0{len(text)}\0".encode() + text)
    return hashed.hexdigest()


def digest_of(corpus: str, versions: Mapping[str, str], outcomes: Iterable[tuple[str, str]]) -> str:
    """One short name for: this corpus, these versions, these outcomes.

    Args:
        corpus: Its `corpus_hash`.
        versions: Of the packages, by name.
        outcomes: Pairs of an entry's id and its outcome.
    """
    data = [corpus, sorted(versions.items()), sorted(outcomes)]
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]


def save(record: SelftestRecord, key: str, corpus: str, versions: Mapping[str, str]) -> None:
    """Keep it for later runs on the device `key`: of one machine's records the newest."""
    cache.save(_name(key, corpus, versions), record)


def newest(key: str, versions: Mapping[str, str]) -> SelftestRecord | None:
    """The newest record of the device `key`, these versions and the corpus as it is now."""
    return cache.load(_name(key, corpus_hash(), versions), SelftestRecord)


def in_environment(key: str, versions: Mapping[str, str]) -> object:
    """Return what a run stores about the selftest: the record, or a note that there is none."""
    record = newest(key, versions)
    return NOT_RUN if record is None else to_json(record)


def told(environment: Mapping[str, object]) -> str | None:
    """Return a report's line about the selftest; None for runs of versions that had none."""
    stored = environment.get("selftest")
    if stored is None:
        return None
    try:
        return from_json(SelftestRecord, stored).text
    except RecordError:
        return f"{NOT_RUN} on that machine with those versions"


def line(environment: Mapping[str, object]) -> str | None:
    """Describe the record in one line for a terminal, with the words that say what it is about."""
    text = told(environment)
    return None if text is None else f"selftest: {text}"


def _name(key: str, corpus: str, versions: Mapping[str, str]) -> str:
    return cache.named("selftest", key, corpus, *sorted(versions.items()))
