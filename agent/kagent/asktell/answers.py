"""Answers from outside: which ask each one is for, what it proposes, whether it was told before.

An answer is the text of a whole reply (hypothesis, prediction, one fenced file) or a plain kernel
file. It is for the ask that `--ask` names, or its first line, or its file's name; a plain kernel
may be for none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kagent_sandbox.data.language import languages_in
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.task import Task
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.errors import UserError
from kagent_sandbox.syntax import parse

from kagent.asktell.open_asks import named_by_header
from kagent.asktell.state import AskTellState, Told, read_state
from kagent.candidate_file import read_candidate
from kagent.evolve.stored_run import setting_for
from kagent.llm.drafts import draft_of
from kagent.llm.reply import Answer, read_reply
from kagent.runs.ask import Ask, Draft, Nobody
from kagent.runs.lineage import Operator, Origin, Proposal, kernel_id
from kagent.runs.manifest import identity
from kagent.runs.store import RunStore

MOST_CHARACTERS = 4_000_000  # of an answer: far more than any model writes
_NUMBERED = re.compile(r"([0-9]{4,9})(?:[-_. ].*)?")


@dataclass(frozen=True, slots=True)
class Given:
    """An answer as it came. `label` is the file's name, `ask` the number that it is for."""

    text: str
    label: str
    ask: int | None
    is_kernel: bool  # a plain kernel file, not a reply that holds one
    by: str = Nobody.name  # who answered, where that was said


@dataclass(frozen=True, slots=True)
class Accepted:
    """An accepted answer: candidate `id`. `again`: it had been told before, as `id`."""

    id: int
    ask: int | None
    label: str
    fault: str = ""  # why a reply holds no kernel: recorded, and counted, all the same
    again: bool = False


def read_answers(
    paths: Sequence[Path], store: RunStore, state: AskTellState, entry: str, ask: int | None = None
) -> list[Given]:
    """Read files and find the ask that each one answers.

    Args:
        paths: The files.
        store: The run.
        state: Its asks and answers.
        entry: Name of the task's function.
        ask: The user's choice of the ask for a single file.

    Raises:
        UserError: A file cannot be read, is for another run, or for an ask that there is not.
    """
    if ask is not None and len(paths) > 1:
        raise UserError(f"--ask {ask} is for one file, and {len(paths)} were given")
    return [
        given(read_candidate(path), path.name, store, state, entry, ask=ask, file=True)
        for path in paths
    ]


def given(
    text: str,
    label: str,
    store: RunStore,
    state: AskTellState,
    entry: str,
    *,
    ask: int | None = None,
    file: bool = False,
    kernel: bool = False,
) -> Given:
    """Return an answer with its ask.

    Args:
        text: The answer.
        label: Name in messages.
        store: The run.
        state: Its asks and answers.
        entry: Name of the task's function.
        ask: The user's choice of the ask.
        file: Whether the label is a file's name, which may name the ask.
        kernel: Whether the text is a kernel whatever it looks like; it names no ask then.

    Raises:
        UserError: It is for another run, for an ask that there is not, or too large.
    """
    if len(text) > MOST_CHARACTERS:
        most = f"an answer has at most {MOST_CHARACTERS:,}"
        raise UserError(f"{label}: {len(text):,} characters, and {most}")
    text = text.removeprefix("\ufeff")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{label}: holds half a character (a lone surrogate), which is no text")
    is_kernel = kernel or (file and label.endswith(".py")) or _is_kernel(text, entry)
    if ask is None and not kernel:
        ask = _named(text, label, store, file=file)
    if ask is None and not is_kernel:
        raise UserError(
            f"{label}: it names no ask: name the file after its ask (0007.md), begin it with the "
            "first line of the prompt's file, or give --ask 7"
        )
    if ask is not None and ask not in state.asks:
        have = f"0 to {max(state.asks)}" if state.asks else "none yet"
        raise UserError(f"{label}: no ask {ask} in {store.folder.name}: it has {have}")
    return Given(text, label, ask, is_kernel)


def answered_by(answer: Given, name: str | None) -> Given:
    """Return an answer with the name of who gave it, where there is one."""
    return replace(answer, by=(name or "").strip() or answer.by)


def _named(text: str, label: str, store: RunStore, *, file: bool) -> int | None:
    """The ask that an answer names: in its first line, or by its file's name."""
    numbered = _NUMBERED.fullmatch(label) if file else None
    by_name = int(numbered[1]) if numbered is not None else None
    said = named_by_header(text)
    if said is None:
        return by_name
    number, run = said
    if run != identity(store.folder, store.manifest):
        raise UserError(f"{label}: answers an ask of another run ({run}), not of {store.folder}")
    if by_name not in (None, number):
        raise UserError(f"{label}: its name says ask {by_name}, its text ask {number}: give --ask")
    return number


def _is_kernel(text: str, entry: str) -> bool:
    """Whether a text is Python that defines the entry, rather than a reply around such a file."""
    try:
        statements = parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(s, ast.FunctionDef) and s.name == entry for s in statements)


def accept(
    store: RunStore, task: Task, answers: Sequence[Given], budget: int, parent: int | None = None
) -> list[Accepted]:
    """Make candidates of answers, in order, and keep them; each is committed by itself.

    Args:
        store: The run, open for writing.
        task: Its task.
        answers: What was told.
        budget: Of the run before its first session.
        parent: What kernels that nobody asked for descend from; by default the incumbent.

    Raises:
        UserError: There is no such parent, or an answer to an ask was given one.
        RunError: The run cannot be written.
    """
    state = read_state(store.history())
    setting = setting_for(store, task, state.history, budget)
    proposals, told = state.proposals, list(state.told)
    if parent is not None and not 0 <= parent < len(proposals):
        raise UserError(f"no candidate {parent}: the run has 0 to {len(proposals) - 1}")
    asked = [a for a in answers if a.ask is not None]
    if parent is not None and asked:
        raise UserError(f"{asked[0].label} answers ask {asked[0].ask}, which has its own parent")
    accepted = []
    for answer in answers:
        if answer.ask is None:
            ask, draft = None, _unasked(answer, state, parent)
        else:
            ask = state.ask(setting, answer.ask)
            draft = _asked(answer, ask, state.cards.get(answer.ask, ""))
        same = _told_before(answer, draft, proposals, told)
        if same is not None:
            accepted.append(Accepted(same, answer.ask, answer.label, draft.fault, again=True))
            continue
        if not any(not a.again for a in accepted):
            store.append("opened", {"by": "tell"})
        proposal = _proposal(draft, ask, len(proposals), len(state.history.lineage))
        record = Told(proposal.id, answer.ask, kernel_id(answer.text), answer.label)
        if answer.ask is not None:
            before = sum(t.ask == answer.ask for t in told)
            store.write_text("replies", answer.ask, before, answer.text)
        store.propose(proposal, more=[("told", to_json(record))])
        proposals.append(proposal)
        told.append(record)
        accepted.append(Accepted(proposal.id, answer.ask, answer.label, draft.fault))
    return accepted


def _told_before(
    answer: Given, draft: Draft, proposals: Sequence[Proposal], told: Sequence[Told]
) -> int | None:
    """The candidate that this answer is already: the same text for the same ask, or for any where
    nobody asked. (A kernel that answers a second ask is an answer, and a duplicate.)
    """
    text, kernel = kernel_id(answer.text), kernel_id(draft.source)
    for t in told:
        if t.text == text and t.ask == answer.ask:
            return t.id
    for p in proposals:
        if not draft.fault and p.kernel == kernel and answer.ask in (None, p.ask):
            return p.id
    return None


def _asked(answer: Given, ask: Ask, card: str) -> Draft:
    found: Answer | Rejected
    if answer.is_kernel:
        found = Answer(_about(answer.text), None, answer.text)
    else:
        found = read_reply(answer.text, ask.setting.task.entry)
    return draft_of(ask, found, Origin(answer.by, card))


def _unasked(answer: Given, state: AskTellState, parent: int | None) -> Draft:
    """A kernel that nobody asked for: a new file, whatever it was made from."""
    incumbent = state.history.lineage.incumbent
    if parent is None:
        parent = incumbent.id if incumbent is not None else 0
    stem = re.sub(r"\W+", "_", Path(answer.label).stem).strip("_").lower() or "told"
    languages = tuple(each.name for each in languages_in(answer.text))
    return Draft(
        parents=(parent,),
        operator=Operator.TOLD,
        name=stem if not languages or stem.startswith(languages) else f"{languages[0]}_{stem}",
        source=answer.text,
        hypothesis=_about(answer.text),
        origin=Origin(answer.by),
    )


def _proposal(draft: Draft, ask: Ask | None, number: int, seen: int) -> Proposal:
    if ask is not None:
        return draft.proposal(ask, number)
    return Proposal(
        id=number,
        parents=draft.parents,
        operator=draft.operator,
        name=draft.name,
        source=draft.source,
        hypothesis=draft.hypothesis,
        seen=seen,
        origin=draft.origin,
    )


def _about(source: str) -> str:
    """The first line of a file's docstring."""
    try:
        text = ast.get_docstring(parse(source)) or ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        text = ""
    return (text.strip().splitlines() or ["(no hypothesis)"])[0][:400]
