"""Time of calls from Python."""

import statistics
import time
from collections.abc import Callable


def us_per_call(
    *functions: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
    settle: Callable[[], object] = lambda: None,
    blocks: int = 30,
    calls: int = 200,
) -> list[float]:
    """µs a call of each function: a median over blocks of calls, the functions in turns.

    Args:
        *functions: What is called. Their first block, which warms up, does not count.
        clock: Gives seconds: of the wall, or of a thread.
        settle: Empties the device's queue between blocks.
        blocks: Blocks that count.
        calls: In a block.
    """
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(1 + blocks):
        for function, found in zip(functions, times, strict=True):
            settle()
            begun = clock()
            for _ in range(calls):
                function()
            found.append(1e6 * (clock() - begun) / calls)
    settle()
    return [statistics.median(found[1:]) for found in times]
