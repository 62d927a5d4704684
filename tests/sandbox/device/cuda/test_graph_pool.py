"""Graphs' memory: torch counts those of a pool, drops it with the last, and takes no failed one."""

import itertools

import pytest
import torch
from kagent_sandbox.device.cuda.timing import GraphPool


class Stub:
    """Stands for a graph."""


@pytest.fixture
def pool(monkeypatch):
    numbers = itertools.count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    return GraphPool()


def test_graphs_share_memory_while_one_of_them_lives(pool):
    first, second, third = Stub(), Stub(), Stub()
    assert pool.enter(first) == pool.enter(second) == (0, 1)
    pool.leave(first)
    assert pool.enter(first) == (0, 1)
    pool.leave(first)
    pool.leave(second)
    assert pool.enter(third) == (0, 2)


def test_after_a_failure_memory_is_other_though_earlier_graphs_live(pool):
    before, failed, after, last = Stub(), Stub(), Stub(), Stub()
    assert pool.enter(before) == pool.enter(failed) == (0, 1)
    pool.forget()
    assert pool.enter(after) == (0, 2)
    pool.leave(after)  # torch has dropped (0, 2)
    assert pool.enter(last) == (0, 3)
    pool.leave(before)
    assert pool.enter(after) == (0, 3)
