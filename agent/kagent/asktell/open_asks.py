"""The next prompts of a run, as files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kagent_sandbox.data.records import to_json
from kagent_sandbox.errors import UserError

from kagent.asktell.open_run import ready
from kagent.asktell.prompt_preview import prompter_of
from kagent.asktell.state import AskTellState, Prompted, read_state
from kagent.config.settings import Config
from kagent.evolve.stored_run import setting_for, task_of_run
from kagent.llm.drafts import text_of
from kagent.runs.ask import AskRecord, Prompt
from kagent.runs.files import read_file
from kagent.runs.lineage import Operator
from kagent.runs.manifest import identity
from kagent.runs.store import RunStore
from kagent.search.select import select

_RULE = "\n\n---\n\n"  # between the two messages, as `text_of` has it
_HEADER = re.compile(r"[^\w\n]{0,40}kagent ask ([0-9]{1,9}) of run ([0-9a-f]{1,64})\b")


@dataclass(frozen=True, slots=True)
class OpenAsk:
    """One prompt that waits for an answer."""

    id: int
    """Number of the ask."""
    operator: Operator
    """Operator that makes the answer: rewrite, repair, crossover, ..."""
    parent: int
    """Id of the candidate that is to be improved."""
    card: str
    """Name of the technique in the prompt; empty where there is none."""
    system: str
    """The system message."""
    user: str
    """The user message."""
    path: Path
    """The prompt's file."""

    @property
    def prompt(self) -> str:
        """Both messages in one text."""
        return text_of(Prompt(self.system, self.user))


def ask(folder: Path, count: int, config: Config) -> list[OpenAsk]:
    """Decide on the next asks, write their prompts, and keep both.

    Args:
        folder: Folder of the run.
        count: Number of asks.
        config: Budget, templates and tuning.

    Raises:
        UserError: Nothing is left to improve, the run has a proposer of its own, or the prompts'
            templates are wrong.
        RunError: The run cannot be read or written.
    """
    with RunStore.open(folder) as store:
        manifest = store.manifest
        task = task_of_run(folder, manifest)
        ready(store, task)
        state = read_state(store.history())
        history = state.history
        setting = setting_for(store, task, history, config.budget)
        prompter = prompter_of(task, manifest, history, config)
        pending = [state.ask(setting, a.number) for a in state.under_way]
        asks: list[OpenAsk] = []
        for number in range(history.asked, history.asked + count):
            try:
                ask = select(setting, history.lineage, number, pending, state.seeds)
            except ValueError:
                raise UserError(
                    f"{folder}: every seed was rejected (kagent show {folder.name}), so that there "
                    f"is nothing to improve: tell a kernel of your own with kagent tell "
                    f"{folder.name} FILE.py"
                ) from None
            pending.append(ask)
            prompt = prompter.write(ask)
            text = f"{header(number, identity(folder, manifest))}\n\n{text_of(prompt)}"
            if not asks:
                store.append("opened", {"by": "ask"})
            path = store.write_text("prompts", number, 0, text)
            prompted = Prompted(number, prompt.card)
            store.ask(ask.record(), ("prompted", to_json(prompted)))
            asks.append(_open_ask(ask.record(), prompt, path))
        return asks


def open_asks(store: RunStore, state: AskTellState) -> list[OpenAsk]:
    """Prompts that nobody has answered, as they were written.

    Raises:
        RunError: A prompt's file is gone.
    """
    found = []
    for asked in state.open:
        path = store.text_path("prompts", asked.number)
        text = read_file(path)
        system, _, user = text.partition("-->\n\n")[2].partition(_RULE)
        prompt = Prompt(system, user, state.cards.get(asked.number, ""))
        found.append(_open_ask(asked, prompt, path))
    return found


def _open_ask(asked: AskRecord, prompt: Prompt, path: Path) -> OpenAsk:
    return OpenAsk(
        id=asked.number,
        operator=asked.operator,
        parent=asked.parent,
        card=prompt.card,
        system=prompt.system.rstrip() + "\n",
        user=prompt.user.rstrip() + "\n",
        path=path,
    )


def header(number: int, run: str) -> str:
    """The first lines of a prompt's file. An answer that repeats the first one needs no name."""
    return (
        f"<!-- kagent ask {number:04} of run {run} -->\n"
        f"<!-- answer in a file whose name begins with {number:04}, or put the line above first -->"
    )


def named_by_header(text: str) -> tuple[int, str] | None:
    """Ask and run that an answer says it is for, in its first line that is not blank."""
    found = _HEADER.match(text.lstrip())
    return (int(found[1]), found[2]) if found is not None else None
