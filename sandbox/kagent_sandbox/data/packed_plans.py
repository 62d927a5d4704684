"""Plans as they travel: text that is parsed when somebody looks at a plan, and not before.

Parsing takes most of the time of an agent whose builders are elsewhere, and it only passes plans
on. Who executes them validates them first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kagent_sandbox.data.plan import Plan
from kagent_sandbox.data.plan_json import dump_plan, parse_plan

Key = tuple[int, str]
"""Index of a configuration, and name of a case."""


class PackedPlans(Mapping[Key, Plan]):
    """Plans by configuration and case.

    Args:
        texts: Each plan as `dump_plan` has written it.
        work_hash: What `Built.work_hash` was where they were parsed; "" if nobody has said.
    """

    def __init__(self, texts: Mapping[Key, bytes], work_hash: str = "") -> None:
        self.texts = texts
        self.work_hash = work_hash
        self._parsed: dict[Key, Plan] = {}

    def __getitem__(self, key: Key) -> Plan:
        """The plan, parsed now. Raises PlanError if it is malformed."""
        if key not in self._parsed:
            self._parsed[key] = parse_plan(self.texts[key])
        return self._parsed[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)


def texts_of(plans: Mapping[Key, Plan]) -> Mapping[Key, bytes]:
    """Plans as they travel."""
    if isinstance(plans, PackedPlans):
        return plans.texts
    return {key: dump_plan(plan) for key, plan in plans.items()}
