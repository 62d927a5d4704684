"""The proposer that needs no model: other values of declared tunables, mixes, and recombined
kernels.

Structure is a person's or a model's work; constants, and which kernel serves which shape, are this
one's. It never proposes what was tried, and says so when nothing is left.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from kagent_sandbox.data.verdict import Rejected

from kagent.runs.ask import Ask, Draft
from kagent.runs.lineage import Candidate, Operator
from kagent.search.tunables import Tunable, Tunables, Value, read_tunables, same, value_text

CHANGES = (0.55, 0.30, 0.15)  # probability of changing 1, 2 or 3 tunables at once
DRAWS = 48  # at random before all neighbours are listed
LISTED = 20_000  # neighbours at most, in spaces that no run exhausts
SHY = 0.15  # weight of a value that nothing has passed with, and something was rejected with

Key: TypeAlias = tuple[str, tuple[str, ...]]  # family and current values as text


class Tuner:
    """A `Proposer`. It prefers the ask's operator and parent, and falls back to whatever is
    left.
    """

    name = "tune"
    operators: tuple[Operator, ...] = (Operator.TUNE, Operator.CROSSOVER, Operator.RECOMBINE)
    at_once = 1
    resamples = 8

    async def propose(self, ask: Ask) -> Draft | None:
        """The next untried file, or None when all neighbours of all that passed were tried."""
        return propose(ask)


def propose(ask: Ask) -> Draft | None:
    """Propose as `Tuner` does; pure."""
    ways: Mapping[Operator, Callable[[Ask, random.Random, set[Key]], Draft | None]] = {
        Operator.TUNE: _tune,
        Operator.CROSSOVER: _cross,
    }
    rng, tried = ask.rng(), _tried(ask)
    for operator in sorted(ways, key=lambda o: o is not ask.operator):
        draft = ways[operator](ask, rng, tried)
        if draft is not None:
            return draft
    return None


def _tried(ask: Ask) -> set[Key]:
    sources = [*(c.proposal.source for c in ask.lineage), *ask.pending]
    files = [read_tunables(s) for s in sources]
    return {_key(f) for f in files if f is not None}


def _key(file: Tunables, values: Mapping[str, Value] | None = None) -> Key:
    values = values or {}
    # repr: True and 1 are equal, but not the same value.
    return file.family, tuple(repr(values.get(t.name, t.current)) for t in file.items)


def _parents(ask: Ask) -> list[Candidate]:
    """The ask's parent, then the elites, then all that passed."""
    order = {c.id: c for c in (ask.parent, *ask.elites, *ask.lineage.passed())}
    return [c for c in order.values() if c.score is not None]


# -- tune ----------------------------------------------------------------------------------------


def _tune(ask: Ask, rng: random.Random, tried: set[Key]) -> Draft | None:
    for parent in _parents(ask):
        file = read_tunables(parent.proposal.source)
        if file is None or not file.items:
            continue
        values = _neighbour(ask, file, rng, tried)
        if values is not None:
            return _draft(Operator.TUNE, (parent,), file, values)
    return None


def _neighbour(
    ask: Ask, file: Tunables, rng: random.Random, tried: set[Key]
) -> dict[str, Value] | None:
    """Untried values of one to three tunables: near ones early in the run, any later."""
    shy = _never_passed(ask, file)
    # Distance loses its weight as the run goes on: 1/d² at the beginning, 1 at the end.
    power = 2.0 * (1.0 - ask.progress)
    free = [t for t in file.items if len(t.values) > 1]
    if not free:
        return None

    def draw(tunable: Tunable) -> Value:
        others = [v for v in tunable.values if not same(v, tunable.current)]
        weights = [
            tunable.steps_to(v) ** -power * (SHY if (tunable.name, repr(v)) in shy else 1.0)
            for v in others
        ]
        return rng.choices(others, weights)[0]

    for _ in range(DRAWS):
        count = rng.choices((1, 2, 3), CHANGES)[0]
        chosen = rng.sample(free, min(count, len(free)))
        values = {t.name: draw(t) for t in chosen}
        if _key(file, values) not in tried:
            return values
    return next((v for v in _neighbours(free) if _key(file, v) not in tried), None)


def _neighbours(free: Sequence[Tunable]) -> Iterator[dict[str, Value]]:
    """All changes of one, two and then three tunables."""
    everything = (
        dict(zip((t.name for t in chosen), values, strict=True))
        for count in range(1, len(CHANGES) + 1)
        for chosen in itertools.combinations(free, count)
        for values in itertools.product(
            *([v for v in t.values if not same(v, t.current)] for t in chosen)
        )
    )
    return itertools.islice(everything, LISTED)


def _never_passed(ask: Ask, file: Tunables) -> set[tuple[str, str]]:
    """Values that candidates of this structure were rejected with, and none passed with."""
    passed: set[tuple[str, str]] = set()
    rejected: set[tuple[str, str]] = set()
    for candidate in ask.lineage:
        other = read_tunables(candidate.proposal.source)
        if other is None or other.family != file.family or candidate.is_duplicate:
            continue
        pairs = {(t.name, repr(t.current)) for t in other.items}
        (rejected if isinstance(candidate.verdict, Rejected) else passed).update(pairs)
    return rejected - passed


# -- crossover -----------------------------------------------------------------------------------


def _cross(ask: Ask, rng: random.Random, tried: set[Key]) -> Draft | None:
    """Values of two elites of one structure, mixed."""
    parents = _parents(ask)[: len(ask.elites) + 1]
    for first, second in itertools.combinations(parents, 2):
        a, b = read_tunables(first.proposal.source), read_tunables(second.proposal.source)
        if a is None or b is None or a.family != b.family:
            continue
        differing = {
            theirs.name: theirs.current
            for ours, theirs in zip(a.items, b.items, strict=True)
            if not same(ours.current, theirs.current)
        }
        for _ in range(DRAWS if len(differing) > 1 else 0):
            values = {n: v for n, v in differing.items() if rng.random() < 0.5}
            if values and _key(a, values) not in tried:
                return _draft(Operator.CROSSOVER, (first, second), a, values)
    return None


def _draft(
    operator: Operator, parents: Sequence[Candidate], file: Tunables, values: Mapping[str, Value]
) -> Draft:
    changes = [
        f"{t.name} {value_text(t.current)} → {value_text(values[t.name])}"
        for t in file.items
        if t.name in values
    ]
    return Draft(
        parents=tuple(p.id for p in parents),
        operator=operator,
        name=parents[0].proposal.name,
        source=file.rewrite(values),
        hypothesis=", ".join(changes),
    )
