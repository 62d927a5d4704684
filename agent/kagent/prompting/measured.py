"""A candidate as a prompt shows it: its time in each case, where it loses, what its kernels use."""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kagent_sandbox.data.compiled import Remark
from kagent_sandbox.data.language import languages_in
from kagent_sandbox.data.verdict import CaseTiming, Passed
from kagent_sandbox.syntax import parse

from kagent.prompting.cases import BenchCase
from kagent.prompting.hardware import Hardware
from kagent.prompting.text import clipped, kib, microseconds, one_line, quoted, ratio, table
from kagent.runs.lineage import Candidate, Lineage
from kagent.text import config_text, kernel_label, loop_lines, plural, remark_lines, widths_text

MOST_KERNELS = 8
MOST_LOOPS = 8
REMARK_LINES = 12
NAME_CHARS = 80
ABOUT_CHARS = 300
SHORT_ROW, LONG_ROW = 2048, 16384  # elements: what one warp, what one block holds at most
_BULK = re.compile(r"cp\.async\.bulk|tensor_descriptor|TensorDescriptor|tensor_map\(")
AT_ROOFLINE = 0.97  # a case with more of the roofline has little left to gain


@dataclass(frozen=True, slots=True)
class MeasuredText:
    """Texts about a candidate's measurements. Tables are Markdown, empty where nothing was
    measured.
    """

    id: int
    name: str
    source: str
    about: str  # first paragraph of its docstring
    languages: tuple[str, ...]
    incumbent: bool
    measured: bool
    coarse: bool  # timed on a few samples only
    speed: str  # "1.418×" the best of torch
    times: str
    setting: str  # values of its tunables when it was timed
    kernels: str
    headroom: str
    numerics: str
    launches: int | None
    facts: frozenset[str]  # needs of cards that hold, or are unknown
    remarks: str  # of its compilers, a line or two each; data, not instructions
    loops: str  # of its machine code, a line each


@functools.lru_cache(maxsize=256)  # prompts of a run quote the same few files
def docstring(source: str) -> str:
    """The file's docstring, or nothing."""
    try:
        return ast.get_docstring(parse(source)) or ""
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def measured(
    candidate: Candidate,
    lineage: Lineage,
    cases: Sequence[BenchCase],
    device: Hardware,
    visible: frozenset[str],
    *,
    matrix: bool,
) -> MeasuredText:
    """Describe a candidate. `visible` are the names of the cases that a prompt may mention."""
    p, verdict, built = candidate.proposal, candidate.verdict, candidate.facts
    passed = verdict if isinstance(verdict, Passed) else None
    timings = passed.timings if passed is not None else ()
    incumbent = lineage.incumbent
    log = lineage.log_speed(candidate.id) if timings else -math.inf
    return MeasuredText(
        id=candidate.id,
        name=one_line(p.name, NAME_CHARS),
        source=p.source,
        about=quoted(docstring(p.source).partition("\n\n")[0], ABOUT_CHARS),
        languages=tuple(each.name for each in languages_in(p.source)),
        incumbent=bool(timings) and incumbent is not None and incumbent.id == candidate.id,
        measured=bool(timings),
        coarse=passed is not None and passed.screened,
        speed=ratio(math.exp(log)) if math.isfinite(log) else "",
        times=_times(candidate, lineage, cases, matrix=matrix) if timings else "",
        setting=_setting(passed) if passed is not None and timings else "",
        kernels=_kernels(passed, p.source, device) if passed is not None else "",
        headroom=_headroom(timings, cases),
        numerics=_numerics(passed, visible) if passed is not None else "",
        launches=max(t.launches for t in timings) if timings else None,
        facts=_facts(passed, timings, cases, device),
        remarks=_remarks(built.remarks) if built is not None else "",
        loops="\n".join(loop_lines(built.loops, MOST_LOOPS)) if built is not None else "",
    )


def _remarks(remarks: Sequence[Remark]) -> str:
    return clipped("\n".join(remark_lines(remarks)), REMARK_LINES, 300) if remarks else ""


def case_logs(candidate: Candidate, lineage: Lineage) -> Mapping[str, float]:
    """Logarithm of its speed-up over torch per case; empty if it was not timed."""
    speed = lineage.speed(candidate.id)
    timed = isinstance(candidate.verdict, Passed) and candidate.verdict.timings
    return speed.cases if speed is not None and timed else {}


def _times(
    candidate: Candidate, lineage: Lineage, cases: Sequence[BenchCase], *, matrix: bool
) -> str:
    verdict = candidate.verdict
    assert isinstance(verdict, Passed)
    logs = case_logs(candidate, lineage)
    floors = {c.name: c.floor_us for c in cases}
    several = len(verdict.configs) > 1
    rows = []
    for t in verdict.timings:
        floor_us = floors.get(t.case)
        log = logs.get(t.case, -math.inf)
        rows.append(
            [
                t.case,
                f"{microseconds(t.kernel_us)} (±{(t.high_us - t.low_us) / 2 / t.kernel_us:.1%})",
                f"{t.tflop_per_s:.0f}" if matrix else f"{t.gb_per_s:,.0f}",
                microseconds(floor_us) if floor_us is not None else "",
                f"{t.roofline_share:.0%}",
                ratio(math.exp(log)) if t.baseline_us and math.isfinite(log) else "",
                str(t.launches),
                config_text(verdict.configs[t.config]) if several else "",
            ]
        )
    rate = "TFLOP/s" if matrix else "GB/s"
    head = ("case", "µs (95 %)", rate, "floor, µs", "of roofline", "× best of torch", "launches")
    return table((*head, "configuration"), rows)


def _setting(verdict: Passed) -> str:
    """Describe the measured configuration: the values of the tunables and their cases."""
    count = len(verdict.configs)
    text = (
        f"Each time is that of the fastest of {count} combinations of its tunables"
        if count > 1
        else "The times are at its tunables' values as assigned in the file"
    )
    several = any(t.launches > 1 for t in verdict.timings)
    return text + ("; the launches of a call were timed together only." if several else ".")


def _headroom(timings: Sequence[CaseTiming], cases: Sequence[BenchCase]) -> str:
    """Describe the headroom: the total, and the cases furthest below the roofline."""
    known = {c.name for c in cases}
    shares = {t.case: t.roofline_share for t in timings if t.case in known and t.roofline_share > 0}
    if not shares:
        return ""
    left = math.exp(-sum(math.log(min(1.0, s)) for s in shares.values()) / len(shares))
    below = sorted((n for n, s in shares.items() if s < AT_ROOFLINE), key=lambda n: shares[n])
    text = f"At 100 % in every case it would be {ratio(left)} as fast in the geometric mean"
    if not below:
        return text + ": what is left is in launches, tails and start-up."
    return f"{text}; furthest below: {', '.join(below[:3])}."


def _numerics(verdict: Passed, visible: frozenset[str]) -> str:
    errors = [e for e in verdict.errors if e.case in visible]
    if not errors:
        return ""
    worst = max(errors, key=lambda e: e.share_of_tolerance)
    return (
        f"Of the tolerance it uses at most {worst.share_of_tolerance:.0%} ({worst.output}, "
        f"{worst.case})."
    )


def _facts(
    passed: Passed | None,
    timings: Sequence[CaseTiming],
    cases: Sequence[BenchCase],
    device: Hardware,
) -> frozenset[str]:
    below = {t.case for t in timings if t.roofline_share < AT_ROOFLINE}
    open_cases = [c for c in cases if c.name in below or not timings]
    rows = {c.row for c in open_cases}
    found = set[str]()
    if None in rows or any(r is not None and r <= SHORT_ROW for r in rows):
        found.add("short_rows")
    if None in rows or any(r is not None and r > LONG_ROW for r in rows):
        found.add("long_rows")
    if passed is None or not timings or not passed.resources:
        return frozenset(found | {"several_launches", "narrow_loads", "spills"})
    if any(t.launches > 1 for t in timings):
        found.add("several_launches")
    if any(width < 16 for r in passed.resources for width in _widths(r)):
        found.add("narrow_loads")
    if any(_number(r, "spill_bytes") or _crowded(r, device) for r in passed.resources):
        found.add("spills")
    return frozenset(found)


def _crowded(r: Mapping[str, object], device: Hardware) -> bool:
    """Whether registers leave room for fewer than a quarter of the warps."""
    threads, registers = _number(r, "threads"), _number(r, "registers")
    if not threads or not registers or device.architecture is None:
        return False
    s = device.residency(threads, registers, _number(r, "shared_bytes"))
    return s.limits == ("registers",) and s.warps * 4 < s.most_warps


def _kernels(verdict: Passed, source: str, device: Hardware) -> str:
    """Kernels with what the compiler says they use; those that spill most, then the largest."""
    if device.is_cpu or not verdict.resources:
        return ""
    ordered = sorted(
        verdict.resources,
        key=lambda r: (-_number(r, "spill_bytes"), -_number(r, "registers")),
    )
    seen: dict[tuple[str, ...], None] = {}
    for r in ordered:
        seen[_kernel_row(r, device)] = None
    rows = list(seen)[:MOST_KERNELS]
    head = ("kernel", "threads", "registers", "spills", "shared memory", "global loads", "resident")
    text = table(head, rows)
    left = len(seen) - len(rows)
    notes = [f"{plural(left, 'further kernel')} not shown"] if left else []
    if _BULK.search(source):
        notes.append("bulk copies into shared memory are not among the global loads")
    return text + (f"\n\n({'; '.join(notes)})" if notes else "")


def _kernel_row(r: Mapping[str, object], device: Hardware) -> tuple[str, ...]:
    threads, registers = _number(r, "threads"), _number(r, "registers")
    shared = _number(r, "shared_bytes")
    resident = ""
    if threads and registers and device.architecture is not None:
        s = device.residency(threads, registers, shared)
        resident = f"{s.blocks} blocks, {s.warps}/{s.most_warps} warps ({' and '.join(s.limits)})"
    return (
        kernel_label(str(r.get("name", "?"))),
        str(threads) if threads else "",
        str(registers),
        kib(_number(r, "spill_bytes")),
        kib(shared),
        widths_text(_widths(r)),
        resident,
    )


def _number(r: Mapping[str, object], key: str) -> int:
    value = r.get(key, 0)
    return value if isinstance(value, int) else 0


def _widths(r: Mapping[str, object]) -> dict[int, int]:
    """Bytes per thread of a global load -> how many such instructions."""
    loads = r.get("load_bytes")
    return {int(k): int(v) for k, v in loads.items()} if isinstance(loads, Mapping) else {}
