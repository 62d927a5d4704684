"""A library's kernels in a script: are the numbers the same, and does the step get faster?

The script runs as it is, once more with what is to be replaced rounded at random, and once with the
kernels, from the same seed. Loss and gradients (or outputs) may be off by a multiple of what
rounding changes. Then its steps are timed in one process, with and without each replacement in
turn. What is not FASTER is taken back.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import replace as replace_fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from kagent_sandbox.data.verdict import SpeedVerdict, speed_verdict
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.timing import estimates
from kagent_sandbox.judge.timing.estimates import Interval, PairedSamples

from kagent.runs.files import write_file
from kagent.text import interval_text
from kagent.workload.hotspots_view import millis
from kagent.workload.patch_file import Library, open_library, patch_text
from kagent.workload.patching import differences
from kagent.workload.running import run_script
from kagent.workload.sites import Site, parse_site, region_site, sites_of_torch
from kagent.workload.step_kind import StepKind

ALLOWED = 16.0
"""Times that a number may be off by what rounding alone changes. A kernel adds up in another order
and rounds several times, where the rounded run rounds once."""
_LEAST = 1e-6  # relative: below it float32 shows no difference that means anything


@dataclass(frozen=True)
class Difference:
    """The number of a patched script that is furthest off, by its share of what is allowed."""

    number: str  # "loss", "gradient 0.3 [64, 64]", "output 0 [8, 10]"
    step: int
    off: float  # relative, of the patched script
    rounded: float  # relative, of the rounded script
    share: float  # of what is allowed


@dataclass(frozen=True)
class Patched:
    """One replacement, and what became of it."""

    site: str
    operator: str
    calls: float  # in a step
    difference: Difference | None = None  # None: every number is the same bit for bit
    ratio: Interval | None = None  # the step's time without it, over that with it
    verdict: SpeedVerdict | None = None
    kept: bool = False
    why: str = ""  # it was taken back


@dataclass(frozen=True)
class Patch:
    """The outcome of a patch."""

    script: str
    sites: Sequence[Patched]
    numbers: int  # that were compared, over all steps
    steps: int
    difference: Difference | None
    before_us: float | None = None  # a step's median without the patch; None if nothing was timed
    after_us: float | None = None  # with all that was kept
    ratio: Interval | None = None  # before / after, interleaved
    file: str | None = None
    disturbed: Sequence[str] = ()  # what else used the processors while steps were timed


@dataclass(frozen=True)
class _Session:
    """Settings that all runs of a script share."""

    script: Path
    args: Sequence[str]
    folder: Path
    kind: StepKind
    seed: int
    file: Path  # with all sites

    def run(self, **request: Any) -> Any:
        common = {"patch": str(self.file), "kind": self.kind, "seed": self.seed}
        return run_script("patching", self.script, self.args, {**common, **request})

    def numbers(
        self, name: str, sites: Sequence[str] | None, steps: int, *, rounded: bool = False
    ) -> Any:
        more = {"sites": sites, "rounded": rounded, "steps": steps}
        return self.run(mode="numbers", file=str(self.folder / name), **more)


def patch(
    script: Path,
    libraries: Sequence[Path],
    args: Sequence[str],
    *,
    replace: Sequence[str],
    to: Path,
    kind: StepKind,
    steps: int,
    pairs: int,
    warmup: int,
    say: Callable[[str], None] = lambda _: None,
) -> Patch:
    """Put libraries' kernels into a script, and keep those that pay.

    Args:
        script: A Python file of the user's.
        libraries: Folders of libraries, or single files.
        args: The script's arguments.
        replace: Further sites, in words (`sites.parse_site`).
        to: File to write: a Python module, importable by its name. Not written if nothing pays.
        kind: What ends a step.
        steps: Steps whose numbers are compared.
        pairs: Steps that are timed of each configuration.
        warmup: Steps of each configuration before.
        say: Is told what is being done.

    Raises:
        UserError: A library, a site or the script cannot be used.
    """
    opened = [open_library(path) for path in libraries]
    sites = _sites(opened, replace)
    with tempfile.TemporaryDirectory(prefix="kagent-") as name:
        folder = Path(name)
        file = folder / "patch.py"
        file.write_text(patch_text(opened, sites), encoding="utf-8")
        session = _Session(script, args, folder, kind, 0, file)
        found = _compared(session, sites, steps, say)
        right = [p.site for p in found.sites if not p.why]
        if not right:
            return found
        timed = _timed(session, found, sites, right, pairs, warmup, say)
    kept = [s for s in sites if any(p.kept and p.site == s.name for p in timed.sites)]
    if not kept:
        return timed
    try:
        write_file(to, patch_text(opened, kept, _account(timed)))
    except OSError as e:
        raise UserError(f"{to}: cannot be written ({e.strerror})") from None
    return replace_fields(timed, file=str(to))


def _sites(libraries: Sequence[Library], replace: Sequence[str]) -> list[Site]:
    operators = [n for lib in libraries for n in lib.operators]
    if len(set(operators)) != len(operators):
        raise UserError(f"two libraries have a function of one name: {', '.join(operators)}")
    known = [n for lib in libraries if lib.known for n in lib.operators]
    found = {s.name: s for s in sites_of_torch(known)}
    for lib in libraries:
        known_regions = (region_site(name, task) for name, task in lib.regions.items())
        found.update((s.name, s) for s in known_regions)
    found.update((s.name, s) for s in (parse_site(text, operators) for text in replace))
    if not found:
        raise UserError(
            f"no function of torch is known for {', '.join(operators)}: say what to replace with "
            "--replace 'MODULE:NAME(PARAMETERS) = CALL'"
        )
    return list(found.values())


# -- numbers ---------------------------------------------------------------------------------------


def _compared(
    session: _Session, sites: Sequence[Site], steps: int, say: Callable[[str], None]
) -> Patch:
    """Run the script plain, rounded and patched. What is wrong has `why`."""
    names = [s.name for s in sites]
    say("running the script as it is")
    session.numbers("plain", None, steps)
    say("running it with rounding")
    session.numbers("rounded", names, steps, rounded=True)
    yardstick = {
        (step, name): off
        for step, name, off in differences(session.folder / "plain", session.folder / "rounded")
    }
    found = {s.name: Patched(s.name, s.operator, 0.0) for s in sites}

    regions = {s.name for s in sites if s.task}
    graphs: list[str] = []

    def check(wanted: Sequence[str]) -> Difference | None:
        say(f"running it with {', '.join(wanted)}")
        seen = session.numbers("patched", wanted, steps)
        graphs[:] = seen["graphs"]
        worst = _worst(yardstick, session.folder)
        for name in wanted:
            found[name] = replace_fields(
                found[name], calls=seen["calls"].get(name, 0) / steps, difference=worst
            )
        return worst

    def unused(name: str) -> str:
        if found[name].calls:
            return ""
        return _unmatched(graphs) if name in regions else "the script never calls it"

    def drop(wanted: Sequence[str], why: str) -> None:
        for name in wanted:
            found[name] = replace_fields(found[name], why=why)

    def left() -> list[str]:
        return [name for name, p in found.items() if not p.why]

    worst: Difference | None = None
    why = ""
    try:
        worst = check(names)
        why = _too_far(worst)
    except UserError as e:
        if len(names) == 1:
            raise
        why = str(e)
    if not why:
        for name in names:
            drop([name], unused(name))
    elif len(names) == 1:
        drop(names, why)
    else:
        for name in names:  # which of them is it?
            try:
                why = _too_far(check([name]))
            except UserError as e:
                why = str(e)
            drop([name], why or unused(name))
        if len(left()) > 1:
            worst = check(left())
            drop(left(), _too_far(worst))
        elif left():
            worst = found[left()[0]].difference
    return Patch(str(session.script), list(found.values()), len(yardstick), steps, worst)


def _unmatched(graphs: Sequence[str]) -> str:
    """No graph has a region."""
    if not graphs:
        return (
            "no graph was captured: expected a module that is called, and that torch.compile has "
            "not compiled"
        )
    counts = Counter(graphs)
    seen = "; ".join(g if n == 1 else f"{n} times {g}" for g, n in counts.items())
    return f"no graph has these operations with these constants and sizes. Seen: {seen}"


def _worst(yardstick: Mapping[tuple[int, str], float], folder: Path) -> Difference | None:
    """The number that is furthest off for what rounding does to it; None if none is off."""
    middle = {
        step: median(off for (at, _), off in yardstick.items() if at == step)
        for step in {step for step, _ in yardstick}
    }
    found: list[Difference] = []
    for step, name, off in differences(folder / "plain", folder / "patched"):
        rounded = yardstick.get((step, name), 0.0)
        allowed = max(ALLOWED * max(rounded, middle.get(step, 0.0)), _LEAST)
        if off:
            found.append(Difference(name, step, off, rounded, off / allowed))
    return max(found, key=lambda d: d.share, default=None)


def _too_far(worst: Difference | None) -> str:
    if worst is None or worst.share <= 1:
        return ""
    return (
        f"wrong: {worst.number} of step {worst.step} is off by {worst.off:.1e}, where rounding "
        f"changes it by {worst.rounded:.1e}"
    )


# -- times -----------------------------------------------------------------------------------------


def _timed(
    session: _Session,
    found: Patch,
    sites: Sequence[Site],
    right: Sequence[str],
    pairs: int,
    warmup: int,
    say: Callable[[str], None],
) -> Patch:
    """Time steps with each site alone, and with those that are FASTER together."""
    alone = [[name] for name in right]
    regions = {s.name for s in sites if s.task}
    # Graphs as they are captured: what differs from them is the region's alone.
    bases: list[list[str] | None] = [None, []] if regions & set(right) else [None]
    say(f"timing {len(right) + len(bases)} kinds of steps, {pairs} of each, interleaved")
    us, disturbed = _times(session, [*bases, *alone], pairs, warmup)
    found = replace_fields(found, disturbed=disturbed)
    outcomes = []
    for p in found.sites:
        if p.site in right:
            own = us[len(bases) + right.index(p.site)]
            ratio = _ratio(us[1] if p.site in regions else us[0], own)
            verdict = speed_verdict(ratio.low, ratio.high)
            kept = verdict is SpeedVerdict.FASTER
            why = "" if kept else f"{verdict.value}: taken back"
            if kept and p.site in regions:
                script = _ratio(us[0], own)
                whole = speed_verdict(script.low, script.high)
                kept = whole is SpeedVerdict.FASTER
                beside = interval_text(script.value, script.low, script.high)
                slow = f"{whole.value} beside the script without captured graphs, {beside}"
                why = "" if kept else f"{slow}: taken back"
            outcomes.append(replace_fields(p, ratio=ratio, verdict=verdict, kept=kept, why=why))
        else:
            outcomes.append(p)
    kept_names = [p.site for p in outcomes if p.kept]
    before_us = median(us[0])
    if not kept_names:
        return replace_fields(found, sites=outcomes, before_us=before_us)
    if len(kept_names) > 1:
        say("timing all of them together")
        us, disturbed = _times(session, [None, kept_names], pairs, warmup)
        together = us[1]
    else:
        together = us[len(bases) + right.index(kept_names[0])]
    return replace_fields(
        found,
        sites=outcomes,
        before_us=median(us[0]),
        after_us=median(together),
        ratio=_ratio(us[0], together),
        disturbed=disturbed,
    )


def _times(
    session: _Session, configurations: Sequence[Sequence[str] | None], pairs: int, warmup: int
) -> tuple[list[list[float]], Sequence[str]]:
    request = {"configurations": configurations, "pairs": pairs, "warmup": warmup}
    found = session.run(mode="times", **request)
    return found["us"], found["disturbed"]


def _ratio(before_us: Sequence[float], after_us: Sequence[float]) -> Interval:
    """Ratio before / after, from steps of the same rounds."""
    paired = PairedSamples(a=tuple((us,) for us in after_us), b=tuple((us,) for us in before_us))
    return estimates.ratio(paired, np.random.default_rng(0))


# -- the account -----------------------------------------------------------------------------------


def step_text(found: Patch) -> str:
    """The step before and after, in words."""
    assert found.before_us is not None
    if found.after_us is None or found.ratio is None:
        return f"a step takes {millis(found.before_us)} ms, and no replacement makes it faster"
    r = found.ratio
    return (
        f"a step takes {millis(found.before_us)} ms before and {millis(found.after_us)} ms after: "
        f"{interval_text(r.value, r.low, r.high)}"
    )


def numbers_text(found: Patch) -> str:
    """Describe the change of loss and gradients."""
    count = f"{found.numbers} numbers (loss and gradients, or outputs) over {found.steps} steps"
    worst = found.difference
    if worst is None:
        return (
            f"{count} are the same bit for bit; so they are where the library leaves every call to "
            "torch, by the rules of its dispatch"
        )
    return (
        f"{count}: the furthest, {worst.number} of step {worst.step}, is off by {worst.off:.1e}, "
        f"{worst.share:.0%} of what is allowed"
    )


def _account(found: Patch) -> list[str]:
    return [f"{step_text(found)}.", f"{numbers_text(found)}."]


def to_json(found: Patch) -> dict[str, Any]:
    """All of it as data."""
    return asdict(found)
