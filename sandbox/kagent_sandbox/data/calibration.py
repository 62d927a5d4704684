"""Result of `kagent calibrate`: tolerances of a task's results, in calibration.json beside
task.toml.

It is no part of a task's digest: a run goes on after it. Only the owner of a task's folder can
write it, and it cannot allow for more than `MOST_K` and `MOST_FLOOR`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.records import RecordError, from_json, to_json
from kagent_sandbox.errors import TaskError

FILE = "calibration.json"
LEAST_K, MOST_K = 2.0, 16.0
LEAST_FLOOR, MOST_FLOOR = 1.0, 64.0


@dataclass(frozen=True, slots=True)
class ResultCalibration:
    """The tolerance of one result, and what it comes from.

    Attributes:
        k: Times torch's own error.
        floor: Machine epsilons of the result's dtype.
        of_torch: The largest error of all ways to compute it, in multiples of torch's own.
        of_eps: The same in machine epsilons.
        why: Which way, and in which case, decided.
    """

    k: float
    floor: float
    of_torch: float
    of_eps: float
    why: str


@dataclass(frozen=True, slots=True)
class KindCalibration:
    """A calibration on one kind of device.

    Attributes:
        digest: The task's, as it was calibrated.
        device: Name of the device.
        torch: Version of torch.
        made: Local time, ISO 8601.
        cases: Number of cases.
        ways: Ways to compute the results that were tried.
        results: By result; those that must be equal are left out.
        left_out: Ways that could not be tried, with the reason.
    """

    digest: str
    device: str
    torch: str
    made: str
    cases: int
    ways: tuple[str, ...]
    results: Mapping[str, ResultCalibration]
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Calibration:
    """All of a task, by kind of device."""

    kinds: Mapping[str, KindCalibration]


def read_calibration(folder: Path, digest: str) -> Calibration | None:
    """The calibration of a task's folder; None if there is none.

    Args:
        folder: The folder.
        digest: The task's.

    Raises:
        TaskError: It is damaged, allows for too much, or the task was changed since.
    """
    path = folder / FILE
    try:
        found = from_json(Calibration, json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, RecordError) as e:
        text = " ".join(str(e).split())
        raise TaskError(f"{path}: {text}: calibrate again, or remove the file") from None
    for kind, known in found.kinds.items():
        if known.digest != digest:
            raise TaskError(
                f"{path}: made for another task.toml or reference.py ({kind}): calibrate again "
                "(kagent calibrate), or remove the file"
            )
        for name, each in known.results.items():
            if not (0 < each.k <= MOST_K and 0 <= each.floor <= MOST_FLOOR):
                raise TaskError(
                    f"{path}: {kind}, {name}: k = {each.k:g} and floor = {each.floor:g}: expected "
                    f"k up to {MOST_K:g} and floor up to {MOST_FLOOR:g}"
                )
    return found


def write_calibration(folder: Path, calibration: Calibration) -> None:
    """Write calibration.json."""
    text = json.dumps(to_json(calibration), indent=2, allow_nan=False) + "\n"
    (folder / FILE).write_text(text, encoding="utf-8")
