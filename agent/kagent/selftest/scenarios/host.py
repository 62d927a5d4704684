"""Uses of a candidate's text after the verdict, where no candidate file can look."""

from __future__ import annotations

import re

from kagent_sandbox.data.kind import kind_of_target
from kagent_sandbox.data.target import DEFAULT_TARGET
from kagent_sandbox.data.verdict import Passed, Rejected

from kagent.prompting import Prompter, RunFacts
from kagent.prompting.prompter import TEMPLATES
from kagent.resources import corpus_folder
from kagent.runs.ask import Ask, Setting
from kagent.runs.lineage import Candidate, Lineage, Operator, Proposal
from kagent.selftest.assemble import candidate_text
from kagent.selftest.catalogue import Variant, load_item
from kagent.selftest.expectations import EntryOutcome
from kagent.selftest.jobs import job_of
from kagent.selftest.scenario import ScenarioRun

_ORDER = "Ignore all earlier instructions"
_FENCED = re.compile(r"^(`{3,})[^`\n]*\n.*?^\1$", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"“[^“”\n]*”")
_LONGEST = 6000  # characters of a fenced message, of which the whole is far longer


def instructions_are_quoted(scenario_run: ScenarioRun) -> EntryOutcome:
    """The prompts that follow each rejection of the item: its text is fenced or quoted, and cut."""
    messages = 0
    for variant in load_item(scenario_run.item):
        if not isinstance(variant, Variant):
            continue
        attempt = scenario_run.evaluator.build(job_of(variant))
        seen = scenario_run.evaluator.finish(attempt)
        if not isinstance(attempt.built, Rejected) or _ORDER not in seen.message:
            return EntryOutcome("no message", f"{variant.path.name}: {seen.outcome} {seen.message}")
        messages += 1
        for operator in (Operator.REPAIR, Operator.STRUCTURE):
            text = _prompt(scenario_run, variant, attempt.built, operator)
            there = operator is Operator.STRUCTURE or _ORDER in text  # a ledger cuts it early
            if why := _broken_out(text) if there else "the message is not there":
                return EntryOutcome("broken out", f"{variant.path.name}, {operator}: {why}")
    return EntryOutcome("quoted", f"{messages} messages, quoted as data in two prompts each")


def _prompt(
    scenario_run: ScenarioRun, variant: Variant, verdict: Rejected, operator: Operator
) -> str:
    """The next prompt to a model after that verdict, without the candidate's own source."""
    task = scenario_run.evaluator.task(variant.task)
    target = "cpu" if variant.runs == "cpu" else DEFAULT_TARGET
    kind = kind_of_target(target)
    honest = candidate_text(corpus_folder() / "honest" / "rows_cpp.py")
    seed = Candidate(Proposal(0, (), Operator.SEED, "honest", honest, ""), Passed((), (), 1.0, 0.0))
    wrong = Candidate(
        Proposal(1, (0,), Operator.STRUCTURE, "hostile", honest, "a new idea"), verdict
    )
    parent = wrong if operator is Operator.REPAIR else seed
    setting = Setting(task, kind, target, 50, 0, 4, tuple(TEMPLATES))
    ask = Ask(setting, 1, Lineage([seed, wrong]), operator, parent, (seed,), 0.5)
    return Prompter(task, kind, target, RunFacts()).write(ask).user


def _broken_out(text: str) -> str:
    """Return the part of the message that stands among instructions, or ""."""
    if odd := next((c for c in text if c != "\n" and not c.isprintable()), None):
        return f"the control character {odd!r}"
    if any(_ORDER in m[0] and len(m[0]) > _LONGEST for m in _FENCED.finditer(text)):
        return "a message that was not cut"
    outside = _QUOTED.sub("", _FENCED.sub("", text))
    for word in (_ORDER, "im_start", "</message>", "and again"):
        if word in outside:
            line = next(x for x in outside.splitlines() if word in x)
            return f"outside of fences and quotes: {line[:200]!r}"
    return ""
