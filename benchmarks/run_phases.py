"""Where the time of a run went, from its own log.

    python benchmarks/run_phases.py RUN_FOLDER

Prints the wall-clock time of the phases (baselines and ceilings, search, final race), and medians
of what a candidate took to build and of how long it held the timed lane.
"""

import statistics
import sys
from pathlib import Path

from kagent.lineage import Operator
from kagent.show import read_history
from kagent_sandbox.verdict import Passed


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
    print(f"whole                    {events[-1].at - start:7.1f} s")
    builds = [c.facts.build_s for c in history.lineage if c.facts]
    print(f"build, median            {statistics.median(builds):7.2f} s")
    for name, screened in (("let go early", True), ("timed in full", False)):
        verdicts = [c.verdict for c in history.lineage if isinstance(c.verdict, Passed)]
        lanes = [v.lane_s for v in verdicts if v.screened is screened]
        if lanes:
            middle, most = statistics.median(lanes), max(lanes)
            print(f"measure, {name:<15} {middle:7.2f} s  (most {most:.2f}, {len(lanes)} of them)")


if __name__ == "__main__":
    main()
