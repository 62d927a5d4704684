"""Two suites beside each other, over the problems that compare.

Winners of two suites ran in races of their own, on hidden cases of their own. How much faster one
is than the other, only a race of the two says.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.race import BEST_OF_TORCH
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Comparison, Rejected, SpeedVerdict
from kagent_sandbox.errors import KagentError
from kagent_sandbox.runtime.text import printable
from rich.console import RenderableType
from rich.text import Text

from kagent.config.settings import Config
from kagent.evolve.machine import contender
from kagent.evolve.open_machine import open_machine
from kagent.evolve.stored_run import task_of_run
from kagent.runs.lineage import Candidate, kernel_id
from kagent.runs.manifest import Manifest
from kagent.runs.store import read_history
from kagent.suite import view
from kagent.suite.record import RUNS, FailedStep
from kagent.suite.results import (
    Figures,
    ProblemResult,
    SuiteResults,
    comparison_json,
    figures,
    figures_json,
    geometric_mean,
)
from kagent.text import short
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import ratio_text, verdict_text

SAME_KERNEL = "the same kernel"
NOT_RACED = "Ctrl-C"
_MOST_REASON = 200  # characters
_BEFORE, _AFTER = "before", "after"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Pair:
    """A problem that two suites finished, with the same task and device.

    Attributes:
        before: Its result in the first suite.
        after: Its result in the second one.
        race: The second winner beside the first one, in a race of the two: time of the first / time
            of the second. None if they were not raced.
        no_race: Why there is no such race.
    """

    before: ProblemResult
    after: ProblemResult
    race: Comparison | None = None
    no_race: str = ""

    @property
    def both_correct(self) -> bool:
        """Whether both suites found a correct kernel."""
        return self.before.correct and self.after.correct


@dataclass(frozen=True, slots=True)
class SuitePair:
    """Two suites, the problems that compare, and the others by name with the reason."""

    before: SuiteResults
    after: SuiteResults
    pairs: tuple[Pair, ...]
    excluded: tuple[tuple[str, str], ...]

    @property
    def figures(self) -> tuple[Figures, Figures]:
        """Figures of each suite over the problems that compare."""
        sides = ([p.before for p in self.pairs], [p.after for p in self.pairs])
        return figures("", sides[0]), figures("", sides[1])

    @property
    def means(self) -> tuple[int, float | None, float | None]:
        """Number of problems that both solved and raced beside the best of torch, and each suite's
        geometric mean over just these.
        """
        both = [p for p in self.pairs if p.before.versus_torch and p.after.versus_torch]
        before = [p.before.beside[BEST_OF_TORCH].ratio for p in both]
        after = [p.after.beside[BEST_OF_TORCH].ratio for p in both]
        return len(both), geometric_mean(before), geometric_mean(after)

    @property
    def raced(self) -> bool:
        """Whether winners were to be raced."""
        return any(p.race is not None or p.no_race for p in self.pairs)

    @property
    def races(self) -> list[Comparison]:
        """Races of the two winners."""
        return [p.race for p in self.pairs if p.race is not None]


def pair_up(before: SuiteResults, after: SuiteResults) -> SuitePair:
    """Find the problems of two suites that compare: of one name, both finished, with the same task
    to the letter, raced on the same device.
    """
    others = {p.name: p for p in after.problems}
    devices = _only_device(before), _only_device(after)
    pairs: list[Pair] = []
    excluded: list[tuple[str, str]] = []
    for p in before.problems:
        other = others.pop(p.name, None)
        why = f"not in {after.name}" if other is None else _differs(p, other, devices)
        if other is None or why:
            excluded.append((p.name, why))
        else:
            pairs.append(Pair(p, other))
    excluded += [(name, f"not in {before.name}") for name in others]
    return SuitePair(before, after, tuple(pairs), tuple(excluded))


def _only_device(side: SuiteResults) -> str:
    """The device of all races of a suite, and so of searches that failed; "" if there are several
    or none.
    """
    keys = {p.device_key for p in side.problems if p.device_key}
    return keys.pop() if len(keys) == 1 else ""


def _differs(before: ProblemResult, after: ProblemResult, devices: tuple[str, str]) -> str:
    """Reason why two results of one problem do not compare; "" if they do."""
    if not (before.progress.finished and after.progress.finished):
        return "not finished in both"
    if FailedStep.MACHINE in (before.progress.step, after.progress.step):
        return "the machine failed"
    digests = {before.progress.digest, after.progress.digest}
    if "" not in digests and len(digests) > 1:
        return "its tasks differ"
    keys = before.device_key or devices[0], after.device_key or devices[1]
    if "" not in keys and keys[0] != keys[1]:
        return f"on {keys[0]} and on {keys[1]}"
    return ""


# -- races -----------------------------------------------------------------------------------------


def race_winners(
    found: SuitePair, folders: tuple[Path, Path], config: Config, say: Say
) -> SuitePair:
    """Race the two winners of every problem, on hidden cases drawn now. Ctrl-C leaves out what is
    not raced yet, and nothing else.

    Args:
        found: The suites.
        folders: Their folders.
        config: Jobs and isolation.
        say: Is told what is being done.
    """
    pairs = list(found.pairs)
    for i, pair in enumerate(pairs):
        if not pair.both_correct:
            continue
        say(f"{i + 1} of {len(pairs)}, {pair.after.name}: race of the two winners")
        try:
            pairs[i] = _raced(pair, folders, config, say)
        except KagentError as e:
            pairs[i] = replace(pair, no_race=short(printable(str(e)), _MOST_REASON))
        except KeyboardInterrupt:
            left = (replace(p, no_race=NOT_RACED) if p.both_correct else p for p in pairs[i:])
            pairs[i:] = left
            break
    return replace(found, pairs=tuple(pairs))


def _raced(pair: Pair, folders: tuple[Path, Path], config: Config, say: Say) -> Pair:
    runs = [
        folder / RUNS / result.progress.run
        for folder, result in zip(folders, (pair.before, pair.after), strict=True)
    ]
    entrants = [_winner(run) for run in runs]
    if len({kernel_id(c.proposal.source) for _, c in entrants}) == 1:
        return replace(pair, no_race=SAME_KERNEL)
    manifest = entrants[1][0]
    found = race(task_of_run(runs[1], manifest), manifest.kind, entrants, config, say)
    if isinstance(found, str):
        return replace(pair, no_race=found)
    return replace(pair, race=found)


def _winner(run: Path) -> tuple[Manifest, Candidate]:
    store, history = read_history(run)
    assert history.race is not None, "its problem is correct"
    assert history.race.winner is not None, "its problem is correct"
    return store.manifest, history.lineage[history.race.winner]


def race(
    task: Task,
    kind: Kind,
    entrants: Sequence[tuple[Manifest, Candidate]],
    config: Config,
    say: Say,
) -> Comparison | str:
    """Race two candidates without baselines; why there is no result, if one of them fails.

    Raises:
        KagentError: The machine failed.
    """
    with open_machine(task, kind, config, secrets.randbits(62), say) as (machine, _, _):
        make = machine.race_request or machine.request
        contenders = []
        for name, (manifest, candidate) in zip((_BEFORE, _AFTER), entrants, strict=True):
            configs = candidate.proposal.configs or manifest.configs
            request = replace(make(candidate.proposal.source), max_configs=configs)
            built = machine.builder.build(request)
            if isinstance(built, Rejected):
                return _failed(name, built)
            contenders.append(replace(contender(candidate, built), id=name))
        hidden = machine.race_request is not None
        result = machine.judge.race(contenders, hidden=hidden, baselines=False)
    for name, verdict in result.failed.items():
        return _failed(name, verdict)
    return next(c for c in result.overall[_AFTER] if c.against == _BEFORE)


def _failed(name: str, verdict: Rejected) -> str:
    which = "first" if name == _BEFORE else "second"
    return f"the {which} winner failed: {verdict.status} ({verdict.stage}): {verdict.message}"


# -- output ----------------------------------------------------------------------------------------


def pair_view(found: SuitePair) -> Iterator[RenderableType]:
    """Describe every problem that compares, then the figures over all of them."""
    names = found.before.name, found.after.name
    total = len(found.pairs) + len(found.excluded)
    yield Text(f"{names[0]} → {names[1]}", "bold").append(
        f": {len(found.pairs)} of {total} problems compare", "default"
    )
    for side in (found.before, found.after):
        yield Text(f"{side.name}: {view.setting_text(side)}", "dim")
    if found.pairs:
        yield _pairs_table(found)
        yield Text()
        yield _figures_table(found)
    count, before, after = found.means
    if before is not None and after is not None:
        yield Text(
            f"geometric mean beside the best of torch over the {count} that both solved: "
            f"{before:.3f}× → {after:.3f}×"
        )
    if found.races:
        yield _races_text(found)
    for p in found.pairs:
        if p.no_race not in ("", SAME_KERNEL):
            yield Text(f"{p.after.name}: not raced: {p.no_race}", "yellow")
    if found.pairs and not found.raced:
        yield Text(
            "Each suite's ratios are of its own races, on hidden cases of its own: how much faster "
            "one winner is than the other, --race measures.",
            "dim",
        )
    for name, why in found.excluded:
        yield Text(f"{name}: {why}", "yellow")


def _races_text(found: SuitePair) -> Text:
    verdicts = Counter(c.verdict for c in found.races)
    counts = ", ".join(f"{verdicts[v]} {v}" for v in SpeedVerdict)
    mean = geometric_mean([c.ratio for c in found.races])
    return Text(
        f"{found.after.name}'s winners beside {found.before.name}'s, raced now: {counts}; "
        f"geometric mean {view.mean_text(mean, len(found.races))}"
    )


def _pairs_table(found: SuitePair) -> TextTable:
    names = found.before.name, found.after.name
    beside = (
        Column(f"{names[1]} beside {names[0]}", right=True),
        Column("95 % interval", right=True, drop=1),
        Column("verdict"),
    )
    table = TextTable(
        (
            Column("problem"),
            *chain.from_iterable(
                (Column(f"{name}, × torch", right=True), Column("verdict")) for name in names
            ),
            *(beside if found.raced else ()),
        )
    )
    for p in found.pairs:
        cells = [cell for side in (p.before, p.after) for cell in _side(side)]
        if found.raced:
            same = p.no_race == SAME_KERNEL
            verdict = Text(SAME_KERNEL, "dim") if same else _verdict(p.race)
            cells += [ratio_text(p.race), Text(view.interval_of(p.race)), verdict]
        table.add_row(Text(p.after.name, "bold"), *cells)
    return table


def _verdict(c: Comparison | None) -> Text:
    return verdict_text(None if c is None else c.verdict)


def _side(p: ProblemResult) -> tuple[Text, Text]:
    return ratio_text(p.versus_torch), verdict_text(p.verdict) if p.correct else view.state_cell(p)


def _figures_table(found: SuitePair) -> TextTable:
    table = view.empty_figures_table(found.before.record)
    for side, f in zip((found.before, found.after), found.figures, strict=True):
        _, *cells = view.figures_row(f, side.record)
        table.add_row(side.name, *cells)
    return table


def pair_json(found: SuitePair) -> dict[str, object]:
    """The comparison for programs."""
    count, before, after = found.means
    sides = zip((found.before, found.after), found.figures, strict=True)
    return {
        **{
            which: {"suite": side.name, **asdict(side.record.settings), "all": figures_json(f)}
            for which, (side, f) in zip((_BEFORE, _AFTER), sides, strict=True)
        },
        "both_correct": {"problems": count, "before": before, "after": after},
        "problems": [_pair_json(p) for p in found.pairs],
        "excluded": dict(found.excluded),
    }


def _pair_json(p: Pair) -> dict[str, object]:
    return {
        "name": p.after.name,
        **{
            which: {
                "state": view.state_text(side),
                "versus_torch": _comparison_json(side.versus_torch),
            }
            for which, side in ((_BEFORE, p.before), (_AFTER, p.after))
        },
        "race": _comparison_json(p.race),
        "no_race": p.no_race,
    }


def _comparison_json(c: Comparison | None) -> dict[str, object] | None:
    return None if c is None else comparison_json(c)
