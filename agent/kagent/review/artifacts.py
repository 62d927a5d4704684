"""Texts of a candidate: its prompt, its reply, and its compiled code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from kagent_sandbox.builder.binary.disassemble import disassemble
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import Built
from kagent_sandbox.data.plan import KernelInfo
from kagent_sandbox.data.verdict import Rejected
from kagent_sandbox.errors import UserError

from kagent.evolve.open_machine import request_maker, visible_cases
from kagent.evolve.stored_run import todays_task
from kagent.runs.history import History
from kagent.runs.lineage import Candidate, Operator, Proposal
from kagent.runs.store import RunStore
from kagent.text import kernel_label


def kept_text(store: RunStore, history: History, candidate: Candidate, what: str) -> str:
    """The "prompt" or "reply" of a candidate, word for word.

    Raises:
        UserError: It has none: a seed, the tuner's work, or told without an ask.
    """
    p = candidate.proposal
    path = store.reply_path(history, p) if what == "reply" else _prompt_path(store, p)
    if path is None:
        author = p.origin.model if p.origin is not None else "kagent itself"
        kind = "kernel that was told" if p.operator is Operator.TOLD else p.operator
        raise UserError(f"#{candidate.id} has no {what}: it is a {kind} by {author}")
    return path.read_text(encoding="utf-8", errors="replace")


def _prompt_path(store: RunStore, proposal: Proposal) -> Path | None:
    if proposal.ask is None:
        return None
    path = store.text_path("prompts", proposal.ask, proposal.attempt)
    return path if path.is_file() else None


def rebuilt(
    store: RunStore,
    candidate: Candidate,
    jobs: int,
    say: Callable[[str], None],
    *,
    ptx: bool = False,
) -> Built:
    """A candidate built once more, for the visible cases of its task; with `ptx`, its PTX is kept.

    Raises:
        UserError: It does not build, or has no PTX; the text says why.
        RunError: The task is not to be found.
    """
    manifest = store.manifest
    if ptx and manifest.target == "cpu":
        raise UserError(
            f"#{candidate.id} is compiled for the CPU, where there is no PTX: --sass prints the "
            "host's assembly"
        )
    task = todays_task(store.folder, store.manifest)  # nothing is compared
    cases = visible_cases(task, manifest.kind)
    configs = candidate.proposal.configs or manifest.configs
    device = manifest.facts or manifest.target
    request = request_maker(task, device, cases, configs)
    with Builder(jobs, on_wait=say) as builder:
        built = builder.build(replace(request(candidate.proposal.source), ptx=ptx))
    if isinstance(built, Rejected):
        raise UserError(f"#{candidate.id} does not build: {built.status}: {built.message}")
    return built


def machine_code(built: Built) -> Iterator[tuple[str, str]]:
    """Each kernel's label and machine code: SASS, or the host's assembly for C++.

    Raises:
        ToolchainError: The tool that prints it is missing.
    """
    kernels = _kernels(built)
    wanted = {h: (k.language, built.binaries[h]) for h, k in kernels.items()}
    for key, text in disassemble(wanted).items():
        yield kernel_label(kernels[key].name), text


def ptx_texts(built: Built) -> Iterator[tuple[str, str]]:
    """Each kernel's label and PTX, of what was built with it."""
    for key, kernel in _kernels(built).items():
        yield kernel_label(kernel.name), built.ptx.get(key, "// its process kept no PTX\n")


def _kernels(built: Built) -> dict[str, KernelInfo]:
    """Return the kernels by hash."""
    return {k.hash: k for plan in built.plans.values() for k in plan.kernels}
