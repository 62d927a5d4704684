import asyncio
import random

import pytest
from kagent.evolve.device_slot import DeviceSlot


def traffic(*, quiet, builders=3, seed=0):
    """Random work through a lane; what was seen to run at the same time."""
    rng = random.Random(seed)
    running = {"build": 0, "check": 0, "measure": 0}
    seen = set()

    async def work(lane, kind):
        await asyncio.sleep(rng.random() * 0.02)
        async with getattr(lane, kind)():
            running[kind] += 1
            for _ in range(3):
                seen.add(tuple(running.values()))
                await asyncio.sleep(rng.random() * 0.002)
            running[kind] -= 1

    async def main():
        lane = DeviceSlot(builders, quiet=quiet)
        kinds = ["build"] * 30 + ["check"] * 12 + ["measure"] * 12
        rng.shuffle(kinds)
        await asyncio.gather(*(work(lane, k) for k in kinds))

    asyncio.run(asyncio.wait_for(main(), 30))
    return seen


@pytest.mark.parametrize("quiet", [False, True])
def test_who_may_run_together(quiet):
    seen = traffic(quiet=quiet)
    assert all(build <= 3 for build, _, _ in seen)
    assert all(check + measure <= 1 for _, check, measure in seen)
    assert any(build == 3 for build, _, _ in seen)
    assert any(build and check for build, check, _ in seen)
    overlap = any(build and measure for build, _, measure in seen)
    assert overlap is not quiet


def test_a_timing_that_waits_for_a_build_goes_before_checks():
    order = []

    async def main():
        lane = DeviceSlot(2, quiet=True)

        async def use(kind):
            async with getattr(lane, kind)():
                order.append(kind)
                await asyncio.sleep(0)

        async with lane.build():
            timing = asyncio.create_task(use("measure"))
            await asyncio.sleep(0)
            later = [asyncio.create_task(use(kind)) for kind in ("check", "build", "check")]
            await asyncio.sleep(0)
        await asyncio.gather(timing, *later)

    asyncio.run(asyncio.wait_for(main(), 5))
    assert order[0] == "measure"
    assert sorted(order) == ["build", "check", "check", "measure"]


def test_a_cancelled_wait_leaves_the_lane_free():
    async def main():
        lane = DeviceSlot(1, quiet=True)
        async with lane.build():
            waiting = asyncio.create_task(lane.measure().__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        async with lane.build():
            pass
        async with lane.measure():
            pass

    asyncio.run(asyncio.wait_for(main(), 5))
