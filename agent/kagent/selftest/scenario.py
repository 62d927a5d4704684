"""Tools of a scenario, and the lookup of scenarios."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kagent_sandbox.errors import UserError

from kagent.selftest.catalogue import Scenario
from kagent.selftest.evaluator import SelftestEvaluator
from kagent.selftest.expectations import EntryOutcome

ScenarioFunction = Callable[["ScenarioRun"], EntryOutcome]


@dataclass(frozen=True, slots=True)
class ScenarioRun:
    """The tools of a scenario: the evaluator, the item's folder, and a folder of its own."""

    evaluator: SelftestEvaluator
    item: Path
    folder: Path


def scenario_function(scenario: Scenario) -> ScenarioFunction:
    """The function of a scenario: `kagent.selftest.scenarios.<chapter>.<name>`.

    Raises:
        UserError: There is none.
    """
    name = f"kagent.selftest.scenarios.{scenario.item.chapter}"
    try:
        module = importlib.import_module(name)
        return cast("ScenarioFunction", getattr(module, scenario.name))
    except (ModuleNotFoundError, AttributeError):
        raise UserError(
            f"{scenario.item.folder}/item.toml: no function {scenario.name} in {name}"
        ) from None
