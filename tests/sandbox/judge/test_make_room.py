"""Memory of the device that a judge keeps between its turns."""

from types import SimpleNamespace

import pytest
from kagent_sandbox.device.cpu.traits import TRAITS as CPU
from kagent_sandbox.device.cuda.traits import TRAITS as GPU
from kagent_sandbox.judge.judge import Judge

GIB = 1 << 30


@pytest.mark.parametrize(("gib", "kept"), [(2, True), (3, False)])
def test_a_large_arena_goes_back_after_a_turn(gib, kept):
    """Others time on the device, and 6.4 GB of inputs are no rarity."""
    done = []
    judge = SimpleNamespace(
        _arenas=SimpleNamespace(nbytes=gib * GIB, close=lambda: done.append("arena")),
        _most_kept_bytes=int(GPU.kept_launchers.share * 80 * GIB),
        _let_go=lambda: done.append("launchers"),
        backend=SimpleNamespace(free_unused=lambda: done.append("cache")),
    )
    Judge.make_room(judge)
    assert done == (["cache"] if kept else ["launchers", "arena", "cache"])


def test_a_cpu_keeps_its_arenas():
    assert CPU.kept_launchers.share == 1
