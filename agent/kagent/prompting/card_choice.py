"""Choice of an ask's technique card: pure, and different for proposals in flight together.

The cards lie in an order that the run's seed shuffles once. An ask takes one of those whose place
in that order equals its own number, modulo the proposals in flight: neighbours never share a card
(while there are as many cards as that). Among its cards it prefers those that were not tried on its
parent, and where there is data, those that gained more. While the task is far from its ceiling,
decisive cards come before others: they begin the order, so that neighbours get different ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence

from kagent.prompting.cards import Card
from kagent.runs.ask import Ask
from kagent.runs.ideas import Effect, Regime, effects
from kagent.runs.lineage import Lineage

PRIOR_TRIES, PRIOR_GAIN = 4.0, math.log(1.05)
"""An untried card is worth what four tries of a mean speed-up of 1.05 are."""
MOST_REMEMBERED = 8.0  # tries that earlier runs count as, at most: this run's own decide soon


def choose_cards(
    ask: Ask, deck: Sequence[Card], helpful: Collection[Card], decisive: Collection[Card] = ()
) -> tuple[Card, ...]:
    """The cards of an ask, `ask.ideas` of them while there are so many.

    Args:
        ask: The decision to write a prompt for.
        deck: All cards that suit the run: the same for all of its asks.
        helpful: Those of them that can help this parent. None of them: no card.
        decisive: Those of them that come first.
    """
    chosen: list[Card] = []
    rng, worth = ask.rng(), worths(ask.lineage, ask.setting.priors)
    while len(chosen) < ask.ideas and (left := [c for c in helpful if c not in chosen]):
        fitting = _fitting(ask, deck, left, decisive)
        weights = [worth.get(c.name, PRIOR_GAIN) for c in fitting]
        chosen += rng.choices(fitting, weights)
    return tuple(chosen)


def _fitting(
    ask: Ask, deck: Sequence[Card], helpful: Collection[Card], decisive: Collection[Card]
) -> list[Card]:
    """Cards of an ask's share that are new to its parent: decisive ones, or else the next best."""
    share = [c for c in _share(ask, deck, decisive) if c in helpful]
    others = [c for c in deck if c in helpful]
    tried = _tried(ask)
    fresh = [c for c in share if c.name not in tried]
    if not fresh:  # nothing new in its share: whatever is new, else its share again
        fresh = [c for c in others if c.name not in tried] or share or others
    return [c for c in fresh if c in decisive and c.name not in tried] or fresh


def _share(ask: Ask, deck: Sequence[Card], decisive: Collection[Card]) -> list[Card]:
    order = sorted(deck, key=lambda c: c.name)
    seed = f"{ask.setting.seed}/cards"
    random.Random(seed).shuffle(order)  # noqa: S311 - a search, not a secret
    order.sort(key=lambda c: c not in decisive)
    hands = max(1, min(ask.setting.in_flight, len(order)))
    return order[ask.id % hands :: hands]


def _tried(ask: Ask) -> set[str]:
    """Cards of proposals that had this parent, and the card that made it."""
    return {
        technique
        for c in ask.lineage
        if c.proposal.origin is not None
        and (ask.parent.id in c.proposal.parents or c.id == ask.parent.id)
        for technique in c.proposal.origin.techniques
    }


def worths(lineage: Lineage, priors: Sequence[Effect] = ()) -> Mapping[str, float]:
    """Mean log speed-up that each card's proposals gained over what they were made from, failures
    and slower ones as none, shrunk towards `PRIOR_GAIN`: the fewer tries, the more.

    Args:
        lineage: The run's.
        priors: What cards did in earlier runs; more than `MOST_REMEMBERED` tries count as so many.
    """
    own = {e.technique: e for e in effects(lineage) if e.regime is Regime.ALL}
    earlier = {e.technique: e for e in priors if e.regime is Regime.ALL}
    found: dict[str, float] = {}
    for name in sorted({*own, *earlier}):
        tries, gained = PRIOR_TRIES, PRIOR_TRIES * PRIOR_GAIN
        if (before := earlier.get(name)) is not None and before.tries:
            share = min(1.0, MOST_REMEMBERED / before.tries)
            tries += share * before.tries
            gained += share * before.gain_sum
        if (here := own.get(name)) is not None:
            tries += here.tries
            gained += here.gain_sum
        found[name] = gained / tries
    return found
