"""Choice of a candidate's constants before its verdict.

Other values of its tunables are built for the timed cases alone and get a few samples each, beside
the file as it was written. The samples choose, and count for nothing else.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.packed_plans import PackedPlans, texts_of
from kagent_sandbox.data.verdict import Rejected

from kagent.runs.lineage import kernel_id
from kagent.runs.timed_configs import TimedConfig
from kagent.search.config_search import Config, ConfigSearch
from kagent.search.tunables import read_tunables
from kagent.search.tuner import changes, values_of

AT_ONCE = 4  # configurations that are built before they are timed together
LEAST_GAIN = 0.005  # mean log speed-up over the file as written that is worth other constants
MOST_S = 60.0
"""Seconds after which no further configurations are built: a model's call takes half as long."""


@dataclass(frozen=True, slots=True)
class Tuned:
    """A file with better constants. `what` names the changes, `configs` counts what was tried."""

    source: str
    what: str
    configs: int


@dataclass(frozen=True)
class Tuning:
    """Tries at most `configs` configurations of a file.

    `request` makes a build request for the timed cases, `build` builds it, and `sweep` returns the
    µs of each configuration by case; a case is missing where it failed.
    """

    configs: int
    request: Callable[[str], BuildRequest]
    build: Callable[[BuildRequest], Awaitable[Built | Rejected]]
    sweep: Callable[[Built], Awaitable[Sequence[Mapping[str, float]] | Rejected]]
    timed: list[TimedConfig] = field(default_factory=list)
    """Tried configurations: the file as it was written first."""

    async def best(self, source: str, built: Built) -> Tuned | None:
        """The file with the best constants that were found; None where its own are as good.

        Args:
            source: The file as it was written.
            built: What was built of it, for the timed cases at least.
        """
        file = read_tunables(source)
        if file is None or file.size < 2:
            return None
        rng = random.Random(kernel_id(source))  # noqa: S311 - a search, not a secret
        start = tuple(t.index for t in file.items)
        search = ConfigSearch([len(t.values) for t in file.items], start, rng)
        search.add(start, 0.0)
        gains: dict[Config, float] = {start: 0.0}
        tried, began = 1, time.monotonic()
        while tried < self.configs and time.monotonic() - began < MOST_S:
            batch = self._batch(search, min(AT_ONCE, self.configs - tried))
            if not batch:
                break
            tried += len(batch)
            sources = [file.rewrite(values_of(file, config)) for config in batch]
            found = await asyncio.gather(*(self.build(self.request(s)) for s in sources))
            works = {c: b for c, b in zip(batch, found, strict=True) if isinstance(b, Built)}
            times = await self.sweep(together([built, *works.values()])) if works else [{}]
            if isinstance(times, Rejected):
                return None  # the file as it was written failed: its verdict says why
            measured = dict(zip(works, times[1:], strict=True))
            if not self.timed:
                self.timed.append(TimedConfig(values_of(file, start), times[0]))
            for config in batch:
                self.timed.append(TimedConfig(values_of(file, config), measured.get(config, {})))
                gain = _gain(times[0], measured.get(config, {}))
                search.add(config, gain)
                if gain is not None:
                    gains[config] = gain
        best = search.best
        if gains[best] < LEAST_GAIN:
            return None
        values = values_of(file, best)
        return Tuned(file.rewrite(values), changes(file, values), tried)

    def _batch(self, search: ConfigSearch, count: int) -> list[Config]:
        batch: list[Config] = []
        while len(batch) < count and (config := search.next(batch)) is not None:
            batch.append(config)
        return batch


def together(builds: Sequence[Built]) -> Built:
    """Several builds as the configurations of one, the first one's own first."""
    return replace(
        builds[0],
        source_hash=hashlib.sha256("".join(b.source_hash for b in builds).encode()).hexdigest(),
        configs=tuple(b.configs[0] for b in builds),
        plans=PackedPlans(
            {
                (i, case): text
                for i, built in enumerate(builds)
                for (config, case), text in texts_of(built.plans).items()
                if config == 0
            }
        ),
        binaries={h: binary for b in builds for h, binary in b.binaries.items()},
    )


def _gain(declared_us: Mapping[str, float], us: Mapping[str, float]) -> float | None:
    """Mean log speed-up over the cases; None where one is missing."""
    if not us or us.keys() != declared_us.keys():
        return None
    return sum(math.log(declared_us[case] / us[case]) for case in us) / len(us)
