"""Replies per second of fleets of 1 to 64 GPUs, simulated: where a run, or a campaign, waits.

    python benchmarks/fleet_simulation.py            # all tables; about a minute of one core
    python benchmarks/fleet_simulation.py --agent-ms 55

A reply takes a model's time (lognormal), then the agent's (one core of its run), a builder's (one
core), and a judge's on a GPU; then it is recorded, in the order of replies, and the next one is
asked for. The defaults were measured on one GPU: a quarter of replies does not build; of those
that do a tenth is wrong, and of the rest a third is timed in full. It cannot show what equal cards
differ by, nor how a network slows calls down.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections import deque
from dataclasses import dataclass

AGENT_S = 0.005  # of one core a reply (benchmarks/agent_replies.py), without the model's call
PROMOTED = 0.02  # share of verdicts that are given again, by another judge's promotion
BUSY = 0.9  # share of their time that GPUs of a campaign are to be busy


@dataclass(frozen=True)
class Replies:
    """What becomes of a model's replies: shares, and seconds of a GPU with the check."""

    not_built: float = 0.25  # of all
    wrong: float = 0.10  # of the built
    in_full: float = 0.35  # of the correct
    wrong_s: float = 0.20
    let_go_s: float = 0.58
    in_full_s: float = 0.93


@dataclass(frozen=True)
class Fleet:
    """GPUs and cores that runs share."""

    gpus: int
    cores: int
    runs: int
    in_flight: int  # of each run
    latency_s: float  # of a model's reply, on average
    build_s: float  # of one core
    agent_s: float = AGENT_S
    replies: Replies = Replies()


@dataclass(frozen=True)
class Outcome:
    """Replies per second, and the shares of their time that GPUs and cores were busy."""

    rate: float
    gpu: float
    core: float


def simulate(fleet: Fleet, seed: int = 1) -> Outcome:
    """Run until enough replies are recorded after a start that does not count."""
    rng, ticks, replies = random.Random(seed), itertools.count(), fleet.replies
    heap: list[tuple[float, int, str, tuple[int, ...]]] = []
    wanted = max(1000, 60 * fleet.gpus, 3 * fleet.runs * fleet.in_flight)
    warm_s, now = 3 * fleet.latency_s, 0.0
    began: float | None = None
    cores, gpus = fleet.cores, fleet.gpus
    to_build, to_judge = deque[tuple[int, int]](), deque[tuple[int, int]]()
    agent_free = [0.0] * fleet.runs
    numbers, recorded = [0] * fleet.runs, [0] * fleet.runs
    done = [set[int]() for _ in range(fleet.runs)]
    counted, gpu_s, core_s = 0, 0.0, 0.0

    def about(mean: float, sd: float = 0.5) -> float:
        return mean * rng.lognormvariate(-sd * sd / 2, sd)

    def later(seconds: float, event: str, *given: int) -> None:
        heapq.heappush(heap, (now + seconds, next(ticks), event, given))

    def record(run: int, number: int) -> None:
        nonlocal counted
        done[run].add(number)
        while recorded[run] in done[run]:
            done[run].remove(recorded[run])
            recorded[run] += 1
            counted += 1
            later(about(fleet.latency_s), "reply", run)

    for run in range(fleet.runs):
        for _ in range(fleet.in_flight):
            later(about(fleet.latency_s), "reply", run)
    while counted < wanted or began is None:
        now, _, event, given = heapq.heappop(heap)
        if began is None and now >= warm_s:
            began, counted, gpu_s, core_s = now, 0, 0.0, 0.0
        match event, given:
            case "reply", (run,):
                agent_free[run] = max(now, agent_free[run]) + fleet.agent_s
                later(agent_free[run] - now, "taken", run)
            case "taken", (run,):
                to_build.append((run, numbers[run]))
                numbers[run] += 1
            case "built", (run, number):
                cores += 1
                if rng.random() < replies.not_built:
                    record(run, number)
                else:
                    to_judge.append((run, number))
            case "judged", (run, number):
                gpus += 1
                record(run, number)
        while cores and to_build:
            cores -= 1
            seconds = about(fleet.build_s)
            core_s += seconds
            later(seconds, "built", *to_build.popleft())
        while gpus and to_judge:
            gpus -= 1
            share = rng.random()
            seconds = replies.let_go_s if rng.random() >= replies.in_full else replies.in_full_s
            seconds = about(replies.wrong_s if share < replies.wrong else seconds, 0.2)
            if fleet.gpus > fleet.runs and rng.random() < PROMOTED:
                seconds += about(replies.in_full_s, 0.2)  # several judges of one run
            gpu_s += seconds
            later(seconds, "judged", *to_judge.popleft())
    span = now - began
    return Outcome(counted / span, gpu_s / span / fleet.gpus, core_s / span / fleet.cores)


def keeps_busy(
    gpus: int, latency_s: float, build_s: float, agent_s: float
) -> tuple[int, int, float]:
    """Calls in flight and builders' cores that keep a campaign's GPUs busy, a run on each; and its
    replies per second.
    """

    def simulated(in_flight: int, cores: int) -> Outcome:
        return simulate(Fleet(gpus, cores, gpus, in_flight, latency_s, build_s, agent_s))

    in_flight = 1
    while simulated(in_flight, 16 * gpus).gpu < BUSY:
        in_flight = max(in_flight + 1, int(in_flight * 1.2))
    cores = gpus
    while (found := simulated(in_flight, cores)).gpu < 0.97 * BUSY:
        cores = max(cores + 1, int(cores * 1.1))
    return in_flight * gpus, cores, found.rate


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--agent-ms", type=float, default=1000 * AGENT_S, help="of a reply")
    agent_s = options.parse_args().agent_ms / 1000
    print("One run on one GPU, 16 cores, builds of 1 core-s: replies per second, GPU busy")
    for latency_s in (2, 20, 60):
        found = {n: simulate(Fleet(1, 16, 1, n, latency_s, 1.0, agent_s)) for n in (4, 16, 64)}
        cells = "   ".join(f"{n} in flight {o.rate:5.2f} {o.gpu:4.0%}" for n, o in found.items())
        print(f"  model {latency_s:2} s   {cells}")
    print("One run with a judge on each of several GPUs, 64 in flight")
    for latency_s in (2, 20):
        found = {
            k: simulate(Fleet(k, 16 * k, 1, 64, latency_s, 1.0, agent_s)) for k in (1, 2, 4, 8)
        }
        cells = "   ".join(f"{k} GPUs {o.rate:5.2f} {o.gpu:4.0%}" for k, o in found.items())
        print(f"  model {latency_s:2} s   {cells}")
    print("Runs that share one GPU, 4 in flight each, model 20 s")
    found = {r: simulate(Fleet(1, 16, r, 4, 20, 1.0, agent_s)) for r in (1, 2, 5, 10)}
    print("  " + "   ".join(f"{r} runs {o.rate:5.2f} {o.gpu:4.0%}" for r, o in found.items()))
    print(f"A campaign, a run on each GPU: what keeps GPUs busy for {BUSY:.0%}; model 20 s")
    for gpus in (1, 2, 4, 8, 16, 32, 64):
        in_flight, cores, rate = keeps_busy(gpus, 20, 1.0, agent_s)
        print(f"  {gpus:2} GPUs {rate:6.1f} replies/s, {in_flight:5} in flight, {cores:4} cores")
    print("One agent for all GPUs, 60 in flight each, model 20 s: where the agent ends it")
    for gpus in (8, 32, 64):
        one = simulate(Fleet(gpus, 16 * gpus, 1, 60 * gpus, 20, 1.0, agent_s))
        print(f"  {gpus:2} GPUs {one.rate:6.1f} replies/s, GPU {one.gpu:4.0%}")


if __name__ == "__main__":
    main()
