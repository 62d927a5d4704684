"""Cost of confinement per child: from asking for one to its answer, and to its end with all cleaned
up, under each tier that there is here, beside a plain fork of the same process.

python benchmarks/sandbox_spawn.py [torch triton numpy ...]
"""

import os
import statistics
import sys
import time
from dataclasses import replace

from kagent_sandbox.confine import Tier, builder_confinement
from kagent_sandbox.errors import ConfinementError
from kagent_sandbox.process.context import Context
from kagent_sandbox.process.forkserver import ForkServer

CHILDREN = 60
LIMIT_S = 30.0


def answer(context: Context) -> None:
    """Handler: the least that a child can do; told to fork, it does what no tier adds to."""
    while context.channel.recv(LIMIT_S).obj == "fork":
        start = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        context.channel.send(time.perf_counter() - start)
    context.channel.send("done")


def spawn(server: ForkServer) -> tuple[float, float]:
    """Seconds to the answer and to the end."""
    start = time.perf_counter()
    with server.spawn(wall_limit_s=LIMIT_S) as child:
        child.channel.send("answer")
        child.channel.recv(LIMIT_S)
        answered = time.perf_counter() - start
        child.wait(LIMIT_S)
        return answered, time.perf_counter() - start


def plain_fork(server: ForkServer) -> float:
    """Seconds of a fork and its end in a child, median."""
    with server.spawn(wall_limit_s=LIMIT_S) as child:
        times = []
        for _ in range(CHILDREN):
            child.channel.send("fork")
            times.append(float(str(child.channel.recv(LIMIT_S).obj)))
        child.channel.send("answer")
        return statistics.median(times)


def main() -> None:
    """Print medians over all children of each tier, and the least; tiers take turns, so that load
    hits all.
    """
    servers: dict[Tier, ForkServer] = {}
    for tier in Tier:
        confinement = replace(builder_confinement(tier=tier), nice=0)
        server = ForkServer("sandbox_spawn:answer", preload=sys.argv[1:], confinement=confinement)
        server.start()
        try:
            print(server.isolation.describe())
            servers[tier] = server
        except ConfinementError as e:
            print(f"no {tier}: {e}")
            server.close()
    times: dict[Tier, list[tuple[float, float]]] = {tier: [] for tier in servers}
    for _ in range(CHILDREN):
        for tier, server in servers.items():
            times[tier].append(spawn(server))
    fork_ms = 1e3 * plain_fork(servers[Tier.T0])
    print(f"plain fork and its end: {fork_ms:.1f} ms")
    print("   answer: median  least   end: median  least   end over T0")
    bare = statistics.median(ended for _, ended in times[Tier.T0])
    for tier, both in times.items():
        cells = [
            f(column) * 1e3 for column in zip(*both, strict=True) for f in (statistics.median, min)
        ]
        over = (statistics.median(ended for _, ended in both) - bare) * 1e3
        print(
            f"{tier} {cells[0]:14.1f} {cells[1]:6.1f} {cells[2]:13.1f} {cells[3]:6.1f} {over:+9.1f}"
        )
    for server in servers.values():
        server.close()


if __name__ == "__main__":
    main()
