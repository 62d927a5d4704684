"""Sizes of the prompts that a model is sent: lines, characters, tokens.

    python benchmarks/prompt_tokens.py [--target sm_90a] [--run RUN] [--encoding o200k_base]
        [--json FILE]

Without a run: every task's first prompt (from a seed that was not measured) for each operator, with
the largest card that suits it. With one: what would be asked next in it, for each operator that has
a parent. A repair is of a seed with a made-up rejection.

Tokens are counted by tiktoken where it is installed and can load its table (it fetches it once).
Without it they are estimated as characters / 3.4, and the first line says so: counted with the
o200k_base table by another implementation (gpt-tokenizer 3.4.0), these prompts have 3.2 to 3.65
characters a token, and as many by cl100k_base. Other models' tokenizers differ.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from kagent.asktell.prompt_preview import Preview, of_run, of_task
from kagent.config.settings import load_config
from kagent.prompting import TEMPLATES
from kagent.runs.ask import Prompt
from kagent.runs.lineage import Candidate, Operator, Proposal
from kagent.runs.manifest import find_run
from kagent.tasks import task_names
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.errors import UserError

CHARS_PER_TOKEN = 3.4
CARDED = (Operator.STRUCTURE, Operator.REWRITE)


def counter(encoding: str) -> tuple[str, Callable[[str], int]]:
    """How tokens are counted, in words, and the function."""
    try:
        import tiktoken

        table = tiktoken.get_encoding(encoding)
        return f"tokens of {encoding}", lambda text: len(table.encode(text, disallowed_special=()))
    except (ImportError, OSError, ValueError):  # not installed, no network, no such table
        how = f"tokens estimated as characters / {CHARS_PER_TOKEN}"
        return how, lambda text: round(len(text) / CHARS_PER_TOKEN)


def largest(preview: Preview) -> Prompt:
    """The longest prompt that any card makes of a brief."""
    if preview.ask.operator not in CARDED:
        return preview.write()
    prompts = (preview.write(card) for card in preview.prompter.cards)
    return max(prompts, key=lambda p: len(p.user))


def of_operators(preview: Preview) -> list[tuple[Operator, Prompt]]:
    found = []
    for operator in TEMPLATES:
        try:
            found.append((operator, largest(preview.instead(operator, None))))
        except UserError:  # nothing that was rejected
            found.append((operator, largest(with_a_failure(preview))))
    return found


def with_a_failure(preview: Preview) -> Preview:
    ask = preview.ask
    source = ask.parent.proposal.source
    message = f"line 3: `{source.splitlines()[2]}`: a made-up error"
    rejected = Rejected(Stage.BUILD, Status.COMPILE_ERROR, message)
    number = len(ask.lineage)
    parents = (ask.parent.id,)
    name = ask.parent.proposal.name
    proposal = Proposal(number, parents, Operator.STRUCTURE, name, source, "an idea")
    lineage = ask.lineage.as_of(number)
    lineage.record(Candidate(proposal, rejected))
    changed = dataclasses.replace(
        ask, lineage=lineage, operator=Operator.REPAIR, parent=lineage[number]
    )
    return dataclasses.replace(preview, ask=changed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", action="append", help="sm_90a and cpu, unless given")
    parser.add_argument("--run")
    parser.add_argument("--encoding", default="o200k_base")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = load_config()
    how, count = counter(options.encoding)
    print(f"{how}; longest card each; 'source' is the parent's, which a rewrite leaves out")
    print(f"{'prompt':<44} {'lines':>6} {'chars':>7} {'tokens':>7} {'system':>7} {'source':>7}")
    if options.run:
        previews = {options.run: of_run(config, find_run(config.runs, options.run))}
    else:
        targets = options.target or ["sm_90a", "cpu"]
        previews = {f"{t} {n}": of_task(config, n, t) for t in targets for n in task_names()}
    rows = []
    for name, preview in previews.items():
        for operator, prompt in of_operators(preview):
            text = prompt.system + prompt.user
            row = {
                "prompt": f"{name} {operator}",
                "lines": text.count("\n"),
                "chars": len(text),
                "tokens": count(text),
                "system_tokens": count(prompt.system),
                "source_tokens": count(preview.ask.parent.proposal.source),
            }
            rows.append(row)
            values = list(row.values())
            print(
                f"{values[0]:<44} {values[1]:>6} {values[2]:>7} "
                + " ".join(f"{v:>7}" for v in values[3:])
            )
    if options.json:
        options.json.write_text(json.dumps({"how": how, "prompts": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
