"""The proposer that needs no model: other values of declared tunables.

Structure is a person's or a model's work; constants are this one's. It never proposes what was
tried, and says so when nothing is left.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from kagent.runs.ask import Ask, Draft
from kagent.runs.lineage import Candidate, Lineage, Operator
from kagent.search.config_search import Config, ConfigSearch
from kagent.search.tunables import Tunables, Value, read_tunables, same, value_text


class Tuner:
    """A `Proposer`. It prefers the ask's parent, and falls back to whatever is left."""

    name = "tune"
    operators: tuple[Operator, ...] = (Operator.TUNE, Operator.RECOMBINE)
    at_once = 1
    resamples = 8

    async def propose(self, ask: Ask) -> Draft | None:
        """The next untried file, or None when all configurations of all that passed were tried."""
        return propose(ask)


def propose(ask: Ask) -> Draft | None:
    """Propose as `Tuner` does; pure."""
    seen: set[str] = set()
    for parent in _parents(ask):
        file = read_tunables(parent.proposal.source)
        if file is None or file.size < 2 or file.family in seen:
            continue
        seen.add(file.family)
        search, untold = known_configs(file, ask.lineage, ask.rng())
        config = search.next([*untold, *_configs(file, ask.pending)])
        if config is not None:
            return _draft(parent, file, values_of(file, config))
    return None


def known_configs(
    file: Tunables, lineage: Lineage, rng: random.Random
) -> tuple[ConfigSearch, list[Config]]:
    """Measurements of one file's configurations in a run.

    Args:
        file: The file; candidates that differ from it in values alone count.
        lineage: The run's.
        rng: For `ConfigSearch`.

    Returns:
        The search, and configurations that were tried without a result of their own: duplicates.
    """
    search = ConfigSearch(
        [len(t.values) for t in file.items], tuple(t.index for t in file.items), rng
    )
    untold: list[Config] = []
    for candidate in lineage:
        for config in _configs(file, [candidate.proposal.source]):
            if candidate.is_duplicate:
                untold.append(config)
            elif candidate.score is None:
                search.add(config, None)
            else:
                search.add(config, lineage.log_speed(candidate.id))
    return search, [c for c in untold if not search.knows(c)]


def values_of(file: Tunables, config: Config) -> Mapping[str, Value]:
    """A configuration's values by the names of the tunables."""
    return {t.name: t.values[i] for t, i in zip(file.items, config, strict=True)}


def changes(file: Tunables, values: Mapping[str, Value]) -> str:
    """Describe what other values change: 'BLOCK 1024 → 2048, WARPS 4 → 8'."""
    return ", ".join(
        f"{t.name} {value_text(t.current)} → {value_text(values[t.name])}"
        for t in file.items
        if not same(t.current, values[t.name])
    )


def _parents(ask: Ask) -> Iterable[Candidate]:
    """The ask's parent, then the elites, then all that passed."""
    order = {c.id: c for c in (ask.parent, *ask.elites, *ask.lineage.passed())}
    return [c for c in order.values() if c.score is not None]


def _configs(file: Tunables, sources: Sequence[str]) -> Iterable[Config]:
    """Configurations of those texts that differ from a file in values alone, if in listed ones."""
    for source in sources:
        other = read_tunables(source)
        if other is None or other.family != file.family:
            continue
        places = [
            next((i for i, v in enumerate(ours.values) if same(v, theirs.current)), None)
            for ours, theirs in zip(file.items, other.items, strict=True)
        ]
        config = tuple(place for place in places if place is not None)
        if len(config) == len(places):
            yield config


def _draft(parent: Candidate, file: Tunables, values: Mapping[str, Value]) -> Draft:
    return Draft(
        parents=(parent.id,),
        operator=Operator.TUNE,
        name=parent.proposal.name,
        source=file.rewrite(values),
        hypothesis=changes(file, values),
    )
