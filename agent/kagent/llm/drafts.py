"""Drafts from answers: the same for a model's reply and for an answer from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from kagent_sandbox.data.language import LANGUAGES, language_of_source
from kagent_sandbox.data.verdict import Rejected

from kagent.llm.reply import Answer
from kagent.runs.ask import Ask, Draft, Prompt
from kagent.runs.cost import ModelCall
from kagent.runs.lineage import Operator, Origin
from kagent.search.select import mate

N = TypeVar("N", int, float)


def draft_of(ask: Ask, answer: Answer | Rejected, origin: Origin) -> Draft:
    """Make a draft of an answer. If the answer holds no kernel, the draft gives the reason and
    still counts.
    """
    other = mate(ask) if ask.operator is Operator.CROSSOVER else None
    parents = (ask.parent.id,) if other is None else (ask.parent.id, other.id)
    if isinstance(answer, Rejected):
        return Draft(
            parents=parents,
            operator=ask.operator,
            name=ask.parent.proposal.name,
            source="",
            hypothesis="",
            origin=origin,
            fault=answer.message,
        )
    return Draft(
        parents=parents,
        operator=ask.operator,
        name=_name(ask, answer.source, origin.techniques),
        source=answer.source,
        hypothesis=answer.hypothesis,
        predicted=answer.predicted,
        works=answer.works,
        origin=origin,
    )


def origin_of(calls: Sequence[ModelCall], card: str) -> Origin:
    """Return the model that answered last, and the cost of all calls for the answer."""
    return Origin(
        model=calls[-1].model,
        card=card,
        calls=len(calls),
        seconds=sum(c.seconds for c in calls),
        input_tokens=_total([c.input_tokens for c in calls]),
        output_tokens=_total([c.output_tokens for c in calls]),
        dollars=_total([c.dollars for c in calls]),
    )


def text_of(prompt: Prompt) -> str:
    """A prompt as it is stored and shown: both messages, a rule between them."""
    return f"{prompt.system.rstrip()}\n\n---\n\n{prompt.user.rstrip()}\n"


def _name(ask: Ask, source: str, techniques: Sequence[str]) -> str:
    """Name the structure: by its first technique, or as the parent, but in its own language."""
    if ask.operator in (Operator.TUNE, Operator.REPAIR) or not techniques:
        name = ask.parent.proposal.name
        language, _, rest = name.partition("_")
        known = language in LANGUAGES and "+" not in name
        return f"{language_of_source(source).seed_prefix}{rest}" if known else name
    technique = techniques[0].removeprefix("cpu_").replace("-", "_")
    return f"{language_of_source(source).seed_prefix}{technique}"


def _total(values: Sequence[N | None]) -> N | None:
    """The sum of what is known; None where nothing is."""
    known = [v for v in values if v is not None]
    return sum(known[1:], known[0]) if known else None
