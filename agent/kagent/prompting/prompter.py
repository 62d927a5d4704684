"""Prompts from asks: the two messages to a model. Pure, so that a run can be replayed.

The system message holds what is the same for a whole run (task, device, rules), so that endpoints
can cache it; the user message holds the decision: parent, elites, ledger, card, what to do.
"""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Mapping
from pathlib import Path

from kagent_sandbox.data.kind import Kind
from kagent_sandbox.data.language import Language, languages_of
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Passed, Rejected
from kagent_sandbox.errors import UserError
from kagent_sandbox.runtime.cutlass import PACKAGE as CUTLASS

from kagent.prompting.card_choice import choose_cards
from kagent.prompting.cards import Card, Place, helps, is_decisive, is_installed, load_cards, suits
from kagent.prompting.cases import bench_cases, bounds_of, cases_table
from kagent.prompting.elites import diverse, elite
from kagent.prompting.excerpts import sketch
from kagent.prompting.failure_text import distil
from kagent.prompting.hardware import hardware
from kagent.prompting.ledger import ledger, technique_lines
from kagent.prompting.measured import MeasuredText, measured
from kagent.prompting.profiles import in_words
from kagent.prompting.run_facts import RunFacts
from kagent.prompting.task_text import TaskText, about_task
from kagent.prompting.templates import Templates, folders
from kagent.prompting.text import quoted
from kagent.runs.ask import Ask, Prompt
from kagent.runs.lineage import Candidate, Lineage, Operator
from kagent.search.select import mate
from kagent.search.tunables import read_tunables, value_text

NEAR_THE_CEILING = 0.8
"""Share of the roofline from which on no card comes before others."""
IDEA_CHARS = 500  # of the hypothesis of a file that is to be mended
TEMPLATES: Mapping[Operator, str] = {
    Operator.STRUCTURE: "structure",
    Operator.REWRITE: "rewrite",
    Operator.CROSSOVER: "crossover",
    Operator.REPAIR: "repair",
    Operator.TUNE: "tune",
}
"""The operators that a model can be asked for, and the template of each."""


class Prompter:
    """Writes the prompts of one run."""

    def __init__(
        self,
        task: Task,
        kind: Kind,
        target: str,
        run_facts: RunFacts,
        folder: Path | None = None,
    ) -> None:
        """Read templates and cards; `folder` holds the user's own, which replace kagent's.

        Raises:
            UserError: A card is malformed, or the folder or the target does not exist.
        """
        places = folders(folder)
        self._templates = Templates(places)
        self._task, self._kind = task, kind
        self._profiles = run_facts.profiles
        self._tune = run_facts.tune
        self._device = hardware(target, run_facts.device, run_facts.ceilings)
        self._cases = bench_cases(task, kind, self._device, run_facts)
        checks = task.cases(kind)
        self._visible = frozenset(c.name for c in (*checks.check, *checks.bench))
        languages = _languages(kind, run_facts.lang)
        self._languages = tuple(each.name for each in languages)
        self._rules = [each.rules.strip() for each in languages if each.rules]
        self._place = place = Place(
            task.name, target, self._device.target.capability, self._languages
        )
        self._cards = load_cards([p / "cards" for p in places])
        self._deck = [c for c in self._cards.values() if suits(c, place)]
        self._about: TaskText = about_task(task, kind)

    @property
    def cards(self) -> tuple[str, ...]:
        """Names of the cards that suit the run."""
        return tuple(c.name for c in self._deck)

    def write(self, ask: Ask, card: str | None = None) -> Prompt:
        """The prompt for an ask; with `card`, with that technique instead of the dealt one.

        Raises:
            UserError: A template is wrong, or there is no such card.
            ValueError: The operator is none that a model can carry out.
        """
        operator = ask.operator
        if operator not in TEMPLATES:
            raise ValueError(f"a model cannot be asked for {operator}")
        second = mate(ask) if operator is Operator.CROSSOVER else None
        if operator is Operator.CROSSOVER and second is None:
            operator = Operator.STRUCTURE  # there is nothing to cross with
        parent = self._describe(ask.parent, ask)
        chosen = self._dealt(ask, operator, parent) if card is None else (self._named(card),)
        base = _base(ask)
        values = {
            **self._shared,
            "parent": parent,
            "profile": self.profile(ask.parent),
            "sketch": sketch(parent.source, self._task.entry),
            "tunables": _tunables(parent.source),
            "elites": self._elites(ask, operator, second),
            "ledger": ledger(ask),
            "effects": technique_lines(ask),
            "cards": [
                {"title": c.title, "text": self._card_text(c, operator, parent)} for c in chosen
            ],
            "fault": self._fault(ask.parent),
            "idea": quoted(ask.parent.proposal.hypothesis, IDEA_CHARS),
            "base": base,
            "base_measured": isinstance(base.verdict, Passed) and bool(base.verdict.timings),
        }
        return Prompt(
            system=self._templates.render("system", self._shared),
            user=self._templates.render(TEMPLATES[operator], values),
            card="+".join(c.name for c in chosen),
        )

    def profile(self, candidate: Candidate) -> str:
        """Profiles of candidates as a Markdown list; empty where there is none."""
        lines = [
            f"- {p.case}, `{kernel.kernel}`: " + "; ".join(in_words(kernel, self._device))
            for p in self._profiles
            if p.candidate == candidate.id and not self._device.is_cpu
            for kernel in p.kernels
        ]
        return "\n".join(lines)

    @functools.cached_property
    def _shared(self) -> Mapping[str, object]:
        """Values that are the same for all prompts."""
        return {
            "task": self._task,
            "about": self._about,
            "kind": self._kind,
            "device": self._device,
            "languages": self._languages,
            "cutlass": is_installed(CUTLASS),
            "language_rules": self._rules,
            "tune": self._tune,
            "cases": self._cases,
            "cases_table": cases_table(self._cases, matrix=self._task.matrix),
        }

    def _describe(self, candidate: Candidate, ask: Ask) -> MeasuredText:
        return measured(
            candidate,
            ask.lineage,
            self._cases,
            self._device,
            self._visible,
            matrix=self._task.matrix,
        )

    def _elites(self, ask: Ask, operator: Operator, second: Candidate | None) -> list[object]:
        if operator in (Operator.REPAIR, Operator.TUNE):
            return []
        if second is not None:
            return [elite(second, ask, self._cases, second=True)]
        count = 1 if operator is Operator.REWRITE else 2
        return [elite(c, ask, self._cases, second=False) for c in diverse(ask, count)]

    def _fault(self, candidate: Candidate) -> object:
        verdict = candidate.verdict
        if not isinstance(verdict, Rejected):
            return None
        return distil(verdict, candidate.proposal.source, self._task, self._kind)

    # -- the technique ---------------------------------------------------------------------------

    def _dealt(self, ask: Ask, operator: Operator, parent: MeasuredText) -> tuple[Card, ...]:
        if operator is Operator.REPAIR:  # the technique that failed is the one to get right
            origin = ask.parent.proposal.origin
            names = origin.techniques if origin is not None else ()
            return tuple(self._cards[name] for name in names if name in self._cards)
        if operator not in (Operator.STRUCTURE, Operator.REWRITE):
            return ()
        bounds = bounds_of(self._task, self._cases, parent.launches)
        helpful = [c for c in self._deck if helps(c, bounds, parent.facts)]
        if operator is Operator.STRUCTURE:
            new = [c for c in helpful if not c.is_used_in(parent.source)]
            helpful = new or helpful
        decisive: list[Card] = []
        if _best_share(ask.lineage) < NEAR_THE_CEILING:
            decisive = [c for c in self._deck if is_decisive(c, self._place, bounds)]
        return choose_cards(ask, self._deck, helpful, decisive)

    def _named(self, name: str) -> Card:
        if name not in self._cards:
            raise UserError(f"no card {name!r}: there are {', '.join(self._cards)}")
        return self._cards[name]

    def _card_text(self, card: Card, operator: Operator, parent: MeasuredText) -> str:
        """Text of a card for the parent's language, or, without a parent, for the languages that
        may be chosen.
        """
        shown = card.written_in(parent.languages) if operator is not Operator.REWRITE else ()
        shown = shown or card.written_in(self._languages) or card.front.languages
        return card.text(shown, self._device.target.capability)


def _best_share(lineage: Lineage) -> float:
    """Share that the incumbent reaches of the rooflines of its cases, as a geometric mean; 0 where
    nothing was timed.
    """
    incumbent = lineage.incumbent
    verdict = incumbent.verdict if incumbent is not None else None
    shares = [t.roofline_share for t in verdict.timings] if isinstance(verdict, Passed) else []
    return statistics.geometric_mean(shares) if shares and min(shares) > 0 else 0.0


def _base(ask: Ask) -> Candidate:
    """Return the base of a prediction: the parent, or a rejected parent's own parent."""
    if not isinstance(ask.parent.verdict, Rejected):
        return ask.parent
    return ask.lineage.base(ask.parent.id) or ask.parent


def _languages(kind: Kind, lang: str) -> tuple[Language, ...]:
    """Languages that candidates may be written in: of any those whose packages are here."""
    known = languages_of(kind)
    found = tuple(each for each in known if each.name == lang)
    return found or tuple(each for each in known if all(map(is_installed, _names(each.requires))))


def _names(requirements: tuple[str, ...]) -> list[str]:
    """Names of required packages, without their versions."""
    return [re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in requirements]


def _tunables(source: str) -> list[str]:
    """'BLOCK = 1024, of 512, 1024, 2048' for every tunable of a file."""
    file = read_tunables(source)
    return [
        f"{t.name} = {value_text(t.current)}, of {', '.join(map(value_text, t.values))}"
        for t in (file.items if file is not None else ())
    ]
