"""A library's kernels in a script: are the numbers the same, and does the step get faster?

The script runs as it is, once more with what is to be replaced rounded at random, and once with the
kernels, from the same seed. Loss and gradients (or outputs) may be off by a multiple of what
rounding changes. Then its steps are timed in one process, with and without each replacement in
turn. What is not FASTER is taken back.

Regions of graphs are tried twice, unless the script compiles them itself: the rest of their graphs
runs operation by operation, or is compiled by Inductor. A region is compared with the same rest
and nothing replaced.
"""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from kagent_sandbox.data.verdict import SpeedVerdict, speed_verdict
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.timing import estimates
from kagent_sandbox.judge.timing.estimates import Interval, PairedSamples

from kagent.runs.files import place_for, write_file
from kagent.text import interval_text
from kagent.workload.hotspots_view import millis
from kagent.workload.patch_file import Library, open_library, patch_text, require_device
from kagent.workload.patching import differences
from kagent.workload.running import require_script, run_script
from kagent.workload.sites import Rest, Site, parse_site, region_site, sites_of_torch
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
class PatchTrial:
    """Times of a step with one replacement."""

    ratio: Interval  # the step's time without it, over that with it
    verdict: SpeedVerdict
    us: float  # the step's median
    rest: Rest | None = None  # of the graphs; None of what is no region
    script: Interval | None = None  # of a region: the unpatched step's time, over that with it
    kept: bool = False
    why: str = ""  # it is not kept


@dataclass(frozen=True)
class Patched:
    """One replacement, and what became of it."""

    site: str
    operator: str
    calls: float  # in a step
    difference: Difference | None = None  # None: every number is the same bit for bit
    trials: Sequence[PatchTrial] = ()  # the one that counts first
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
    rest: Rest | None = None  # of the graphs in which regions were kept
    compiles: bool = False  # the script gives its modules to torch.compile itself
    captured: Mapping[Rest, Interval] = field(default_factory=dict)
    """Before / after where graphs are captured and nothing is replaced."""
    notes: Sequence[str] = ()  # calls that no kernel takes, and why
    file: str | None = None
    disturbed: Sequence[str] = ()  # what else used the processors while steps were timed


Configuration: TypeAlias = "dict[str, Any] | None"
"""Sites, and the rest of graphs, as the script's process reads it; None: the script as it is."""


def _with(sites: Sequence[str], rest: Rest = "operations") -> Configuration:
    return {"sites": list(sites), "rest": rest}


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
        self, name: str, configuration: Configuration, steps: int, *, rounded: bool = False
    ) -> Any:
        more = {"configuration": configuration, "rounded": rounded, "steps": steps}
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
    rests: Sequence[Rest] = ("operations", "inductor"),
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
        rests: What is tried with the rest of a graph in which a region is replaced. What the
            script compiles itself stays compiled.
        say: Is told what is being done.

    Raises:
        UserError: A library, a site, the script or the file to write cannot be used, or this
            machine lacks the device for every library's kernels.
    """
    require_script(script)
    place = place_for(to)
    opened = [open_library(path) for path in libraries]
    require_device(libraries)
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
        if any(s.task and s.name in right for s in sites):
            found, rests = _rests(session, found, sites, right, rests, steps, say)
        timed = _timed(session, found, sites, right, rests, pairs, warmup, say)
    kept = [s for s in sites if any(p.kept and p.site == s.name for p in timed.sites)]
    if not kept:
        return timed
    try:
        write_file(place, patch_text(opened, kept, _account(timed), timed.rest or "operations"))
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
    session.numbers("rounded", _with(names), steps, rounded=True)
    yardstick = {
        (step, name): off
        for step, name, off in differences(session.folder / "plain", session.folder / "rounded")
    }
    found = {s.name: Patched(s.name, s.operator, 0.0) for s in sites}

    regions = {s.name for s in sites if s.task}
    graphs: list[str] = []
    notes: list[str] = []
    compiles = False

    def check(wanted: Sequence[str]) -> Difference | None:
        nonlocal compiles
        say(f"running it with {', '.join(wanted)}")
        seen = session.numbers("patched", _with(wanted), steps)
        graphs[:] = [*seen["graphs"], *seen["compiled"]]
        notes[:] = seen["notes"]
        compiles = bool(seen["compiled"]) and not seen["graphs"]
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
    return Patch(
        str(session.script),
        list(found.values()),
        len(yardstick),
        steps,
        worst,
        compiles=compiles,
        notes=tuple(notes),
    )


def _rests(
    session: _Session,
    found: Patch,
    sites: Sequence[Site],
    right: Sequence[str],
    rests: Sequence[Rest],
    steps: int,
    say: Callable[[str], None],
) -> tuple[Patch, Sequence[Rest]]:
    """Choose the rests of graphs to time: without Inductor if that fails, or if numbers change."""
    if found.compiles:
        return found, ["inductor"]  # the script's own
    if "inductor" not in rests:
        return found, rests
    regions = [s.name for s in sites if s.task and s.name in right]
    try:
        say("running it compiled by Inductor")
        session.numbers("compiled", _with((), "inductor"), steps)
        say(f"running it compiled, with {', '.join(regions)}")
        session.numbers("patched", _with(regions, "inductor"), steps)
        yardstick = {
            (step, name): off
            for step, name, off in differences(session.folder / "plain", session.folder / "rounded")
        }
        # Other roundings of Inductor's are no kernel's fault.
        why = _too_far(_worst(yardstick, session.folder, "compiled"))
    except UserError as e:
        why = " ".join(str(e).partition("\n\n")[0].split())  # without torch's advice
    if not why:
        return found, rests
    left: list[Rest] = [r for r in rests if r != "inductor"]
    if not left:
        raise UserError(f"the rest of the graphs cannot be compiled by Inductor: {why}")
    note = f"the rest of the graphs is not compiled by Inductor: {why}"
    return replace_fields(found, notes=(*found.notes, note)), left


def _unmatched(graphs: Sequence[str]) -> str:
    """No graph has a region."""
    if not graphs:
        return (
            "no graph was captured: expected a module that is called, or a function that "
            "torch.compile compiles"
        )
    counts = Counter(graphs)
    seen = "; ".join(g if n == 1 else f"{n} times {g}" for g, n in counts.items())
    return f"no graph has these operations with these constants and sizes. Seen: {seen}"


def _worst(
    yardstick: Mapping[tuple[int, str], float], folder: Path, plain: str = "plain"
) -> Difference | None:
    """The number that is furthest off for what rounding does to it; None if none is off."""
    middle = {
        step: median(off for (at, _), off in yardstick.items() if at == step)
        for step in {step for step, _ in yardstick}
    }
    found: list[Difference] = []
    for step, name, off in differences(folder / plain, folder / "patched"):
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
    rests: Sequence[Rest],
    pairs: int,
    warmup: int,
    say: Callable[[str], None],
) -> Patch:
    """Time steps with each site alone, and with those that are FASTER together."""
    regions = [s.name for s in sites if s.task and s.name in right]
    functions = [name for name in right if name not in regions]
    # Graphs as they are captured: what differs from them is the region's alone.
    bases: list[Rest] = list(rests) if regions else []
    tried = [(name, rest) for rest in bases for name in regions]
    configurations = [
        None,
        *(_with((), rest) for rest in bases),
        *(_with([name]) for name in functions),
        *(_with([name], rest) for name, rest in tried),
    ]
    say(f"timing {len(configurations)} kinds of steps, {pairs} of each, interleaved")
    us, disturbed = _times(session, configurations, pairs, warmup)
    plain_us, us = us[0], us[1:]
    base_us = dict(zip(bases, us, strict=False))
    trials: dict[str, list[PatchTrial]] = {name: [] for name in right}
    for name, own_us in zip(functions, us[len(bases) :], strict=False):
        trials[name].append(_trial(plain_us, own_us))
    for (name, rest), own_us in zip(tried, us[len(bases) + len(functions) :], strict=True):
        trials[name].append(_region_trial(plain_us, base_us[rest], own_us, rest))
    chosen = _best_rest(base_us, [t for name in regions for t in trials[name]])
    outcomes = [_outcome(p, trials.get(p.site, ()), chosen) for p in found.sites]
    found = replace_fields(
        found,
        sites=outcomes,
        before_us=median(plain_us),
        captured={r: _ratio(plain_us, of_rest) for r, of_rest in base_us.items()},
        disturbed=disturbed,
    )
    kept = [p for p in outcomes if p.kept]
    return _whole(session, found, kept, regions, chosen, pairs, warmup, say)


def _best_rest(
    base_us: Mapping[Rest, Sequence[float]], trials: Sequence[PatchTrial]
) -> Rest | None:
    """The rest with which a step is likely the shortest, with all regions that pay in it; None if
    none does.
    """
    found: dict[Rest, float] = {}
    for rest, us in base_us.items():
        ratios = [t.ratio.value for t in trials if t.rest == rest and t.kept]
        if ratios:
            found[rest] = median(us) / math.prod(ratios)
    return min(found, key=lambda rest: found[rest], default=None)


def _whole(
    session: _Session,
    found: Patch,
    kept: Sequence[Patched],
    regions: Sequence[str],
    rest: Rest | None,
    pairs: int,
    warmup: int,
    say: Callable[[str], None],
) -> Patch:
    """Compare the script with all that is kept. Regions share what it costs to capture graphs, so
    that only all of them together are held against it.

    Rounds of their own decide on that, and others are reported: what is chosen by a sample looks
    better in it than it is.
    """
    if not kept:
        return found
    rest = rest if any(p.site in regions for p in kept) else None
    say("timing what is kept" if len(kept) == 1 else "timing all of them together")
    configuration = _with([p.site for p in kept], rest or "operations")
    deciding = 0 if rest is None else pairs
    (plain_us, us), disturbed = _times(session, [None, configuration], deciding + pairs, warmup)
    reported_us = plain_us[deciding:], us[deciding:]
    found = replace_fields(found, before_us=median(reported_us[0]), disturbed=disturbed)
    if deciding:
        decides = _ratio(plain_us[:deciding], us[:deciding])
        verdict = speed_verdict(decides.low, decides.high)
        if verdict is not SpeedVerdict.FASTER:
            together = "" if len(kept) == 1 else "together "
            beside = interval_text(decides.value, decides.low, decides.high)
            why = f"{together}{verdict.value} beside the unpatched script, {beside}: taken back"
            sites = [
                replace_fields(p, kept=False, why=why) if p.kept and p.site in regions else p
                for p in found.sites
            ]
            found = replace_fields(found, sites=sites)
            functions = [p for p in kept if p.site not in regions]
            return _whole(session, found, functions, regions, None, pairs, warmup, say)
    ratio = _ratio(*reported_us)
    return replace_fields(found, rest=rest, after_us=median(reported_us[1]), ratio=ratio)


def _trial(before_us: Sequence[float], own_us: Sequence[float]) -> PatchTrial:
    ratio = _ratio(before_us, own_us)
    verdict = speed_verdict(ratio.low, ratio.high)
    kept = verdict is SpeedVerdict.FASTER
    return PatchTrial(
        ratio, verdict, median(own_us), kept=kept, why="" if kept else f"{verdict.value}"
    )


def _region_trial(
    plain_us: Sequence[float], base_us: Sequence[float], own_us: Sequence[float], rest: Rest
) -> PatchTrial:
    """Compare a region with the same graphs as they are, and with the script."""
    script = _ratio(plain_us, own_us)
    return replace_fields(_trial(base_us, own_us), rest=rest, script=script)


def _outcome(p: Patched, trials: Sequence[PatchTrial], rest: Rest | None) -> Patched:
    """Keep it if it pays in the graphs whose rest was chosen."""
    if not trials:
        return p
    first = min(trials, key=lambda t: (t.rest not in (None, rest), not t.kept, -t.ratio.value))
    others = [t for t in trials if t is not first]
    return replace_fields(
        p,
        trials=[first, *others],
        kept=first.kept,
        why="" if first.kept else f"{first.why}: taken back",
    )


def _times(
    session: _Session, configurations: Sequence[Configuration], pairs: int, warmup: int
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


_RESTS = {"operations": "run operation by operation", "inductor": "compiled by Inductor"}


def rests_text(found: Patch) -> list[str]:
    """Describe captured graphs without a kernel in them, beside the script as it is."""
    graphs = "the script's compiled graphs" if found.compiles else "the captured graphs"
    lines = []
    for rest, r in found.captured.items():
        chosen = ": their rest in the patch" if rest == found.rest else ""
        beside = interval_text(r.value, r.low, r.high)
        lines.append(f"{graphs} without a kernel, {_RESTS[rest]}: {beside}{chosen}")
    return lines


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
    lines = [step_text(found), *rests_text(found), numbers_text(found), *found.notes]
    return [f"{line}." for line in lines]


def to_json(found: Patch) -> dict[str, Any]:
    """All of it as data."""
    return asdict(found)
