"""What becomes of a suite's problems: run side by side, recorded as they end, counted by group."""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from limited import Ended, run_all


@dataclass(frozen=True, slots=True)
class Found:
    """What became of a problem.

    Attributes:
        word: "task" where it is one without fault or hole, else "holes", "fault", "refused",
            "timeout" or "crash".
        why: Reasons and notes.
        seeds: Names of the seeds that are right.
    """

    word: str
    why: str = ""
    seeds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A problem with what became of it: a line of `--out`."""

    group: str
    name: str
    word: str
    why: str
    seeds: Sequence[str]
    seconds: float
    cpu_s: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all scripts that import suites."""
    add = parser.add_argument
    add("--limit", type=float, default=600.0, metavar="SECONDS", help="for each problem (600)")
    add("--every", type=int, default=1, metavar="N", help="take every N-th problem")
    add(
        "--from", type=int, default=0, metavar="K", dest="first", help="begin with the K-th, from 0"
    )
    add("--jobs", type=int, default=1, help="problems at once, with an equal share of the cores")
    add("--out", type=Path, metavar="FILE", help="JSON lines of outcomes; what is there stays done")
    add("--join", type=Path, nargs="+", metavar="FILE", help="run nothing: count these outcomes")


def measure(
    options: argparse.Namespace,
    problems: Mapping[tuple[str, str], Sequence[str]],
    read: Callable[[Ended], Found],
) -> int:
    """Run what the options ask for, and print a line for each problem and the table.

    Args:
        options: Those of `add_options`.
        problems: The command of each, by group and name, in order.
        read: Reads how a command ended that was in time.

    Returns:
        The exit status: 130 if a signal ended it early.
    """
    if options.join:
        show([o for file in options.join for o in load(file)], ())
        return 0
    chosen = list(problems)[options.first :: options.every]
    known = {(o.group, o.name): o for o in load(options.out)} if options.out else {}
    outcomes = [known[k] for k in chosen if k in known]
    if outcomes:
        print(f"{len(outcomes)} of {len(chosen)} are in {options.out}", flush=True)
    left = [k for k in chosen if k not in known]

    def done(key: tuple[str, str], ended: Ended) -> None:
        late = ended.status is None
        found = Found("timeout", f"over {options.limit:g} s") if late else read(ended)
        outcome = Outcome(*key, **asdict(found), seconds=ended.seconds, cpu_s=ended.cpu_s)
        outcomes.append(outcome)
        left.remove(key)
        took = f"{ended.seconds:6.1f} s {ended.cpu_s:6.1f} CPU s"
        print(f"{found.word:8} {took}  {'/'.join(key)}  {found.why}", flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")

    commands = {k: problems[k] for k in left}
    stopped = run_all(commands, done, jobs=options.jobs, limit_s=options.limit)
    show(outcomes, left)
    if stopped:
        print(f"{stopped}: {len(left)} of {len(chosen)} were not done", flush=True)
    return 130 if stopped else 0


def load(file: Path) -> list[Outcome]:
    """Outcomes of a file; the last one of each problem. None if it is not there."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    found = [Outcome(**json.loads(line)) for line in lines]
    return list({(o.group, o.name): o for o in found}.values())


def show(outcomes: Sequence[Outcome], left: Sequence[tuple[str, str]]) -> None:
    """Print a table: by group, how many became what."""
    words = list(dict.fromkeys(["task", *(o.word for o in outcomes)]))
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for o in outcomes:
        counts[o.group][o.word] += 1
    for group, _ in left:
        counts[group]["not done"] += 1
    counts = dict(sorted(counts.items()))
    if len(counts) > 1:
        counts["**all**"] = sum(counts.values(), collections.Counter())
    words += ["not done"] if left else []
    print(f"\n| group | problems | {' | '.join(words)} | of those done |")
    print("|---" * (len(words) + 3) + "|")
    for group, count in counts.items():
        done = count.total() - count["not done"]
        share = f"{100 * count['task'] / done:.1f} %" if done else "-"
        cells = " | ".join(str(count[w]) for w in words)
        print(f"| {group} | {count.total()} | {cells} | {share} |")
    seeds = collections.Counter(f"{o.group}: {s}" for o in outcomes for s in o.seeds)
    for name, count_ in sorted(seeds.items()):
        print(f"{name}: {count_}")
    print(f"\n{sum(o.cpu_s for o in outcomes):.0f} s of CPU time", flush=True)
