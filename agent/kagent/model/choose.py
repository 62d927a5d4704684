"""Which model is asked next: by weights, or by what each has gained for its cost."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kagent.lineage import Lineage
from kagent.model.spec import ModelConfig


def choose(
    models: Sequence[ModelConfig], lineage: Lineage, rng: random.Random, *, bandit: bool
) -> str:
    """Name of the model to ask. Equal arguments give equal names."""
    del lineage, bandit
    return rng.choices([m.name for m in models], [m.weight for m in models])[0]
