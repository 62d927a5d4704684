"""Time from asking for a confined child to its answer, and to its end with everything cleaned up.

python benchmarks/sandbox_spawn.py [torch triton numpy ...]
"""

import statistics
import sys
import time

from kagent_sandbox.confine import builder_confinement
from kagent_sandbox.context import Context
from kagent_sandbox.forkserver import ForkServer


def answer(context: Context) -> None:
    """Handler: the least that a child can do."""
    context.channel.send("done")


def main() -> None:
    """Print medians over 50 children."""
    start = time.perf_counter()
    with ForkServer(
        "sandbox_spawn:answer", preload=sys.argv[1:], confinement=builder_confinement()
    ) as server:
        print(f"{server.isolation}, warm after {time.perf_counter() - start:.2f} s")
        answered, ended = [], []
        for _ in range(50):
            start = time.perf_counter()
            with server.spawn(wall_limit_s=10.0) as child:
                child.channel.recv(10.0)
                answered.append(time.perf_counter() - start)
                child.wait(10.0)
                ended.append(time.perf_counter() - start)
    for name, times in (("answer", answered), ("end", ended)):
        print(
            f"{name}: median {statistics.median(times) * 1e3:.1f} ms, worst {max(times) * 1e3:.1f}"
        )


if __name__ == "__main__":
    main()
