"""Output of `kagent show RUN ID`: one candidate of a run."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterable, Mapping

from kagent_sandbox.data.language import reports_resources
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.verdict import Passed, Rejected
from kagent_sandbox.runtime.text import printable
from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.text import Text

from kagent.runs.history import History
from kagent.runs.lineage import Candidate, Lineage, Origin, roofline_share
from kagent.runs.profiles import Profile, stored_profiles
from kagent.runs.store import RunStore
from kagent.text import config_text, human_bytes, kernel_label, ms_text, rate_text, widths_text
from kagent.ui.live import outcome, speed_text
from kagent.ui.plan_view import compiled_texts
from kagent.ui.table import Column, TextTable
from kagent.ui.tables import disturbed_text, errors_table, rejected_text

_REPLY_LINES = 12


def candidate_json(
    lineage: Lineage,
    candidate: Candidate,
    profiles: Iterable[Profile] = (),
    *,
    source: bool = True,
) -> Mapping[str, object]:
    """A candidate; `outcome` is passed or rejected, `gain` its speed-up over its first parent,
    `profiles` those of `profiles` that are its own.
    """
    proposal = dict(_mapping(to_json(candidate.proposal)))
    if not source:
        proposal.pop("source")
    return {
        "proposal": proposal,
        "outcome": "passed" if isinstance(candidate.verdict, Passed) else "rejected",
        "gain": lineage.gain(candidate.id),
        "duplicate_of": candidate.duplicate_of,
        "verdict": to_json(candidate.verdict),
        "facts": to_json(candidate.facts) if candidate.facts else None,
        "profiles": [to_json(p) for p in profiles if p.candidate == candidate.id],
    }


def _mapping(value: object) -> Mapping[str, object]:
    assert isinstance(value, dict)
    return value


def timing_table(candidate: Candidate, *, matrix: bool) -> RenderableType:
    """Cases of a passed candidate: its times, the ratio to the incumbent that was timed in the same
    blocks, and what disturbed it. A configuration that all cases share stands in the title.
    """
    verdict = candidate.verdict
    assert isinstance(verdict, Passed)
    title = f"#{candidate.id} {candidate.proposal.name} on the visible cases"
    used, versus = {t.config for t in verdict.timings}, verdict.versus
    if len(used) == 1:
        title += f", {config_text(verdict.configs[used.pop()])}"
    if candidate.facts is not None and candidate.facts.tuned:
        tried = candidate.facts.configs
        title += f", tuned before its verdict ({tried} tried): {candidate.facts.tuned}"
    table = TextTable(
        (
            Column("case"),
            *([Column("configuration", drop=6)] if used else []),
            Column("ms", right=True),
            Column("95 % interval", right=True, drop=5),
            Column("TFLOP/s" if matrix else "GB/s", right=True, drop=2),
            Column("roofline", right=True, drop=1),
            *([Column(f"× #{versus.against}", right=True)] if versus is not None else []),
            Column("peak memory", right=True, drop=4),
        ),
        title=title,
    )
    for t in verdict.timings:
        ratio = versus.cases.get(t.case, 0.0) if versus is not None else 0.0
        table.add_row(
            t.case,
            *([config_text(verdict.configs[t.config])] if used else []),
            ms_text(t.kernel_us),
            f"{ms_text(t.low_us)}–{ms_text(t.high_us)}",
            rate_text(t, matrix=matrix),
            f"{t.roofline_share:.0%}",
            *([speed_text(ratio)] if versus is not None else []),
            human_bytes(t.peak_bytes),
        )
    notes = [disturbed_text(f"#{candidate.id}", verdict.notes)] if verdict.notes else []
    return Group(table, *notes)


def candidate_view(store: RunStore, history: History, candidate: Candidate) -> RenderableType:
    """Verdict, cases, errors, resources, profiles, and what was changed in the first parent's
    source.

    A candidate without a parent is shown whole; of a reply without a kernel, the first lines.
    """
    lineage = history.lineage
    p, verdict = candidate.proposal, candidate.verdict
    head = Text(f"#{candidate.id} {p.name}", "bold")
    if p.parents:
        parents = ", ".join(f"#{i} {lineage[i].proposal.name}" for i in p.parents)
        head.append(f"   {p.operator} of {parents}", "default")
    head.append(f"\n{p.hypothesis}\n", "dim")
    if p.origin is not None:
        head.append(f"{_origin_text(p.origin)}\n", "dim")
    gain = lineage.gain(candidate.id)
    if p.predicted is not None:
        found = f"{gain:.3f}×" if gain is not None else "not"
        base = lineage.base(candidate.id)
        over = f" over #{base.id}" if base is not None else ""
        head.append(f"predicted {p.predicted:.2f}×{over}, measured {found}\n")
    if p.works is not None:
        found = "it did" if isinstance(verdict, Passed) else "it did not"
        head.append(f"said to work with {p.works:.0%}: {found}\n")
    parts: list[RenderableType] = [head]
    if isinstance(verdict, Rejected):
        parts.append(rejected_text(f"#{candidate.id}", verdict))
    else:
        unit = f" on {candidate.unit}" if candidate.unit else ""
        share = f"{outcome(candidate, math.exp(lineage.log_speed(candidate.id)))[0]}"
        share += f", {roofline_share(verdict):.0%} of the roofline; "
        share += f"held the device {verdict.lane_s:.2f} s{unit}\n"
        parts += [Text(share), timing_table(candidate, matrix=store.manifest.matrix)]
        if verdict.errors:
            title = "relative errors against float64"
            parts += [Text(), errors_table(verdict.errors, title)]
        if any(reports_resources(r.get("language")) for r in verdict.resources):
            parts += [Text(), resource_table(verdict)]
    if candidate.facts is not None:
        parts += compiled_texts(candidate.facts.remarks, candidate.facts.loops)
    parts += _profile_texts(store, history, candidate)
    path = store.kernel_path(p.kernel)
    if p.fault:
        parts += _reply_texts(store, history, candidate)
    elif p.parents:
        parent = lineage[p.parents[0]]
        parts += [Text(f"\nwhat changed in #{parent.id}; the whole file is {path}", "bold")]
        parts.append(styled_diff(parent, candidate))
    else:
        parts += [Text(f"\n{path}", "bold"), _listing(p.source)]
    return Group(*parts)


def _reply_texts(store: RunStore, history: History, candidate: Candidate) -> list[RenderableType]:
    """The first lines of a reply that holds no kernel, and how to see all of it."""
    path = store.reply_path(history, candidate.proposal)
    if path is None:
        return [Text("\nthere is no kernel, and the reply was not kept", "bold")]
    lines = printable(path.read_text(encoding="utf-8", errors="replace")).strip().splitlines()
    more = len(lines) - _REPLY_LINES
    of = f"its first {_REPLY_LINES} of {len(lines)} lines" if more > 0 else "the whole of it"
    command = shlex.join(["kagent", "show", store.folder.name, str(candidate.id), "--reply"])
    end = [Text(f"all of it: {command}", "dim")] if more > 0 else []
    shown = Text("\n".join(lines[:_REPLY_LINES]))
    return [Text(f"\nthe reply holds no kernel; {of}", "bold"), shown, *end]


def _profile_texts(store: RunStore, history: History, candidate: Candidate) -> list[RenderableType]:
    profiles = [p for p in stored_profiles(history).values() if p.candidate == candidate.id]
    if not profiles:
        return []
    from kagent.prompting import run_facts_of  # few candidates have profiles
    from kagent.prompting.hardware import hardware
    from kagent.ui.profile_view import profile_view

    facts = run_facts_of(store.manifest, history)
    device = hardware(store.manifest.target, facts.device, facts.ceilings)
    name = candidate.proposal.name
    title = Text("\nprofiles: what its kernels do on the device", "bold")
    return [title, *(profile_view(p, name, device) for p in profiles)]


def _origin_text(origin: Origin) -> str:
    """'by M, technique wide_accesses, 2 calls in 41 s, 12,034 tokens in, 3,120 out, $0.041'."""
    parts = [f"by {origin.model}"]
    if origin.card:
        parts.append(f"technique {origin.card}")
    if origin.seconds:
        parts.append(f"{origin.calls} call{'s' * (origin.calls > 1)} in {origin.seconds:.0f} s")
    if origin.input_tokens is not None:
        parts.append(f"{origin.input_tokens:,} tokens in, {origin.output_tokens or 0:,} out")
    if origin.dollars is not None:
        parts.append(f"${origin.dollars:.3f}")
    return ", ".join(parts)


def source_diff(before: Candidate, after: Candidate) -> list[str]:
    """Unified diff of two candidates' sources."""
    old, new = (printable(c.proposal.source).splitlines() for c in (before, after))
    return list(difflib.unified_diff(old, new, f"#{before.id}", f"#{after.id}", lineterm=""))


def styled_diff(before: Candidate, after: Candidate) -> Text:
    """Return the diff in colour."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    lines = source_diff(before, after)
    return Text("\n").join(Text(line, styles.get(line[:1], "")) for line in lines)


def _listing(source: str) -> Text:
    """Numbered lines: messages name them."""
    text = printable(source).rstrip("\n")
    lines = Syntax("", "python", theme="ansi_dark").highlight(text).split("\n")
    return Text("\n").join(
        Text(f"{number:>4} ", "dim").append_text(line) for number, line in enumerate(lines, 1)
    )


def resource_table(verdict: Passed) -> TextTable:
    """Kernels with what the compiler says they use."""
    table = TextTable(
        (
            Column("kernel", wrap=True),
            Column("registers", right=True),
            Column("spills", right=True),
            Column("shared memory", right=True),
            Column("global loads", right=True),
        )
    )
    for r in verdict.resources:
        widths = r.get("load_bytes")
        loads = {int(k): int(v) for k, v in widths.items()} if isinstance(widths, Mapping) else {}
        table.add_row(
            kernel_label(str(r.get("name", "?"))),
            str(r.get("registers", "–")),
            human_bytes(int(str(r.get("spill_bytes", 0)))),
            human_bytes(int(str(r.get("shared_bytes", 0)))),
            widths_text(loads),
        )
    return table
