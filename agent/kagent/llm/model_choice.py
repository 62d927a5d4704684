"""Choice of the next model: by weights, or by each model's gain for its cost.

A model's rate is the logarithm of the speed-up that its promotions brought, per dollar, or per
second of its calls where a price is not known. Calls are shared in proportion to weight and to the
square of the rate: luck in a few calls decides little, twice the rate means four times the calls.
A call without a reply is no candidate's and has no rate: each in a row halves a model's share.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from kagent.llm.model_config import ModelConfig
from kagent.runs.lineage import Lineage

HOPE = 0.1
"""Logarithm of the gain (10 %) that a model is credited with for one call that it did not make.
Few calls bring as much, so every model is asked until it has shown a rate of its own."""
FLOOR = 0.2
"""Share of the calls that goes by weight alone: no model starves for a bad start."""


def choose(
    models: Sequence[ModelConfig],
    lineage: Lineage,
    rng: random.Random,
    *,
    bandit: bool,
    failed: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Name of the model to ask. Equal arguments give equal names.

    Args:
        models: At least one.
        lineage: What has been tried, by whom and with what success.
        rng: Drawn from once.
        bandit: Whether success counts, or weights alone.
        failed: Calls in a row without a reply, by model.
    """
    shares = shares_of(models, lineage, bandit=bandit, failed=failed)
    return rng.choices(list(shares), list(shares.values()))[0]


def shares_of(
    models: Sequence[ModelConfig],
    lineage: Lineage,
    *,
    bandit: bool,
    failed: Mapping[str, int] = MappingProxyType({}),
) -> Mapping[str, float]:
    """Each model's probability of being asked."""
    shares = _earned(models, lineage, bandit=bandit)
    if not bandit or not any(failed.values()):
        return shares
    halved = {name: share / 2 ** failed.get(name, 0) for name, share in shares.items()}
    total = sum(halved.values())
    return {name: share / total for name, share in halved.items()}


def _earned(
    models: Sequence[ModelConfig], lineage: Lineage, *, bandit: bool
) -> Mapping[str, float]:
    """The same without a look at calls that failed."""
    total = sum(m.weight for m in models)
    plain = {m.name: m.weight / total for m in models}
    if not bandit:
        return plain
    gains, costs = gains_of(lineage), defaultdict[str, float](float)
    origins = [o for c in lineage if (o := c.proposal.origin) is not None and o.model in plain]
    priced = all(o.dollars is not None for o in origins)  # one unit for all of them
    for origin in origins:
        costs[origin.model] += (origin.dollars or 0.0) if priced else origin.seconds
    calls = sum(o.calls for o in origins)
    usual = sum(costs.values()) / calls if calls else 1.0
    if usual <= 0:
        return plain  # nothing has cost anything
    rates = {name: (gains[name] + HOPE) / (costs[name] / usual + 1) for name in plain}
    earned = {name: plain[name] * rate**2 for name, rate in rates.items()}
    sum_earned = sum(earned.values())
    return {
        name: FLOOR * share + (1 - FLOOR) * earned[name] / sum_earned
        for name, share in plain.items()
    }


def gains_of(lineage: Lineage) -> Mapping[str, float]:
    """Logarithm of the speed-up that each model's promotions brought over those before them."""
    gains: dict[str, float] = defaultdict(float)
    promoted = lineage.promotions
    for before, after in pairwise(promoted):
        if after.proposal.origin is not None:
            gain = lineage.log_speed(after.id) - lineage.log_speed(before.id)
            gains[after.proposal.origin.model] += max(gain, 0.0) if math.isfinite(gain) else 0.0
    return gains
