"""Runs on disk: what each one is (run.json), and finding one by name."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kagent_sandbox.data.device import DeviceFacts
from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.records import RecordError, from_json
from kagent_sandbox.errors import RunError, UserError

from kagent.runs.files import read_regular
from kagent.runs.lineage import Operator

FORMAT = 3  # 3: events have checksums
MOST_BYTES = 16 << 20  # of a manifest


@dataclass(frozen=True, slots=True)
class Manifest:
    """run.json. What must be the same for a run's figures to be comparable."""

    task: str
    task_folder: str
    task_digest: str
    matrix: bool  # its work is matrix products: rates are shown in TFLOP/s
    kind: Kind
    target: str
    seed: int
    lang: str
    proposer: str
    operators: tuple[Operator, ...]
    in_flight: int
    configs: int
    environment: Mapping[str, object]  # device, driver, versions, isolation; {}: none opened yet
    started: str  # local time, ISO 8601
    version: str  # of kagent
    format: int = FORMAT
    id: str = ""  # random: copies of one run share it; empty in runs of earlier versions
    answered_by: str = ""  # who answered its prompts, in words, where its candidates do not say

    @property
    def device(self) -> str:
        """The device of its measurements, or its target where no device was opened for it yet."""
        known = self.environment.get("device")
        return str(known) if known else f"{self.target} (not measured yet)"

    @property
    def proposed_by(self) -> str:
        """The proposer, and where it is known who stands behind it."""
        return f"{self.proposer}: {self.answered_by}" if self.answered_by else self.proposer

    @property
    def facts(self) -> DeviceFacts | None:
        """Facts of the device; None where none was opened for it yet.

        Raises:
            RunError: The record is damaged.
        """
        kept = self.environment.get("facts")
        try:
            return from_json(DeviceFacts, kept) if kept is not None else None
        except (RecordError, TypeError, ValueError, AttributeError) as e:
            raise RunError(f"a record of the run is damaged: {e}") from None


def read_manifest(folder: Path) -> Manifest:
    """run.json of a run's folder.

    Raises:
        RunError: It is missing, damaged, or of a newer format.
    """
    path = folder / "run.json"
    try:
        data = json.loads(read_regular(path, MOST_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{folder}: no run there (no run.json)") from None
    except OSError as e:
        raise RunError(f"{path}: cannot be read ({e.strerror})") from None
    except UserError as e:
        raise RunError(str(e)) from None
    except (ValueError, RecursionError):
        raise RunError(f"{path} is damaged (not JSON): restore it, or start a new run") from None
    version = data.get("format") if isinstance(data, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise RunError(
            f"{folder}: written by kagent {data.get('version', '?')} in run format {version}, and "
            f"this kagent reads formats up to {FORMAT}: update kagent to read it"
        )
    try:
        return from_json(Manifest, data)
    except RecordError as e:
        raise RunError(f"{path}: {e}") from None


def read_digest(folder: Path) -> str:
    """16 hexadecimal digits of a SHA-256 over run.json's values, whatever its spacing. Who answered
    is left out: it may be added later.

    Raises:
        RunError: As `read_manifest`.
    """
    read_manifest(folder)
    data = json.loads(read_regular(folder / "run.json", MOST_BYTES))
    data.pop("answered_by", None)
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity(folder: Path, manifest: Manifest) -> str:
    """Identity of a run: all its copies share it, and no two runs do."""
    if manifest.id:
        return manifest.id
    return hashlib.sha256((folder / "run.json").read_bytes()).hexdigest()[:16]


def list_runs(runs: Path) -> list[Path]:
    """Folders that hold a run, by when the runs started, the earliest first."""
    folders = [p.parent for p in runs.glob("*/run.json")]
    return sorted(folders, key=lambda folder: (_started(folder), folder.name))


def _started(folder: Path) -> float:
    """Seconds since the epoch at which a run started; of a damaged one, its folder's own time.

    A copy's folder, and one that was looked into, has a time of its own.
    """
    try:
        text = json.loads(read_regular(folder / "run.json", MOST_BYTES))["started"]
        return datetime.fromisoformat(text).timestamp()
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError, UserError):
        return folder.stat().st_mtime


def find_run(runs: Path, name: str) -> Path:
    """A run's folder by its name (or an unambiguous beginning of it), by path, or "latest".

    Raises:
        RunError: There is none, or several begin like that.
    """
    known = list_runs(runs)
    if name == "latest" and known:
        return known[-1]
    for folder in (runs / name, Path(name).expanduser()):
        if (folder / "run.json").is_file():
            return folder
    matches = [p for p in known if p.name.startswith(name)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise RunError(f"several runs begin with {name!r}: {', '.join(p.name for p in matches)}")
    if Path(name).expanduser().is_dir():
        raise RunError(f"{name}: no run there (no run.json)")
    last = f"the last {'is' if len(known) == 1 else 'are'} {', '.join(p.name for p in known[-3:])}"
    raise RunError(f"no run {name!r} in {runs}: {last if known else 'it has none'}")


def fresh_folder(runs: Path, stem: str) -> Path:
    """Make a new folder named `stem`, or `stem` and a number.

    Raises:
        RunError: A hundred exist.
    """
    for name in (stem, *(f"{stem}-{i}" for i in range(2, 100))):
        with suppress(FileExistsError):
            (runs / name).mkdir()
            return runs / name
    raise RunError(f"{runs}: too many runs named {stem}")


CUDA_PACKAGES = ("cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")
"""Packages of the extra `cuda` that figures depend on."""
PACKAGES = ("kagent", "torch", "triton", *CUDA_PACKAGES, "numpy")


def versions() -> dict[str, str]:
    """Versions of the packages that figures depend on."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
