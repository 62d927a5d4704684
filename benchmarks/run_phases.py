"""Where the time of a run went, from its own log.

    python benchmarks/run_phases.py RUN_FOLDER

Prints the wall-clock time of the phases (baselines and ceilings, search, final race), and medians
of what a candidate took to build, of how long it held the timed lane, and on what it spent that
(parts of the lane as in `kagent_sandbox.judge.arena.phase_timer`; seeds are left out: the first has
no rival).
"""

import statistics
import sys
from pathlib import Path

from kagent.runs.lineage import Operator
from kagent.runs.store import read_history
from kagent_sandbox.data.verdict import Passed


def main() -> None:
    store, history = read_history(Path(sys.argv[1]))
    events = history.events
    start = events[0].at
    prepared = next((e.at for e in events if e.kind == "baselines"), start)
    recorded = [e.at for e in events if e.kind == "recorded"]
    seeds = sum(c.proposal.operator is Operator.SEED for c in history.lineage)
    raced = next((e.at for e in events if e.kind == "race"), recorded[-1])
    manifest = store.manifest
    versions = manifest.environment.get("versions")
    print(f"{store.folder.name}: {manifest.environment.get('device')}")
    print(f"versions: {versions}")
    print(f"baselines and ceilings   {prepared - start:7.1f} s")
    print(f"{seeds} seeds                  {recorded[seeds - 1] - prepared:7.1f} s")
    search_s = recorded[-1] - recorded[seeds - 1]
    counted = history.lineage.counted
    each_s = search_s / max(counted, 1)
    print(f"{counted} evaluations           {search_s:7.1f} s  ({each_s:.2f} s each)")
    print(f"final race               {raced - recorded[-1]:7.1f} s")
    if history.race is not None and history.race.race.seconds:
        parts_s = history.race.race.seconds
        print("  " + ", ".join(f"{name} {s:.1f}" for name, s in parts_s.items()) + " s")
    # What is done with a run afterwards, an ablation or a profile, is no part of it.
    ended = next((e.at for e in reversed(events) if e.kind == "stopped"), raced)
    print(f"whole                    {ended - start:7.1f} s")
    builds = [c.facts.build_s for c in history.lineage if c.facts]
    print(f"build, median            {statistics.median(builds):7.2f} s")
    tried = [c for c in history.lineage if c.proposal.operator is not Operator.SEED]
    verdicts = [c.verdict for c in tried if isinstance(c.verdict, Passed)]
    for name, screened in (("let go early", True), ("timed in full", False)):
        chosen = [v for v in verdicts if v.screened is screened]
        if chosen:
            lanes = [v.lane_s for v in chosen]
            middle, most = statistics.median(lanes), max(lanes)
            print(f"lane, {name:<18} {middle:7.2f} s  (most {most:.2f}, {len(lanes)} of them)")
            print(f"  {parts(chosen)}")


def parts(verdicts: list[Passed]) -> str:
    """Median of every part of the lane, in ms, the longest first."""
    names = {name for v in verdicts for name in v.lane}
    ms = {n: 1e3 * statistics.median(v.lane.get(n, 0.0) for v in verdicts) for n in names}
    ordered = sorted(ms, key=lambda n: -ms[n])
    return ", ".join(f"{n} {ms[n]:.0f}" for n in ordered) + " ms" if ms else "parts unknown"


if __name__ == "__main__":
    main()
