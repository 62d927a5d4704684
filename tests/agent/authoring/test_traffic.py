"""The fewest bytes that an operation must move: of what an index names, half."""

import pytest
import torch
from kagent.authoring.draft.rooms import find_rooms
from kagent.authoring.new_task import make_task
from kagent.authoring.tracing import traffic
from kagent.authoring.tracing.operation import make_operation
from kagent_sandbox.data.task import load_task
from torch.nn import functional as F

TABLE, IDS = torch.randn(1000, 16), torch.randint(0, 1000, (64,))
CACHE, NEW, SLOTS = torch.randn(128, 16), torch.randn(32, 16), torch.randperm(128)[:32]


def scaled(ids, table):
    return F.embedding(ids, table) * 4


def turned(ids, table):
    return table.t().index_select(1, ids)


def both(ids, table):
    return table[ids] + table.sum(0)


def bag(ids, table, begins):
    return F.embedding_bag(ids, table, begins, mode="sum")


def put(cache, new, slots):
    cache[slots] = new


def add(cache, new, slots):
    cache.index_add_(0, slots, new)


def returned(cache, new, slots):
    return cache.index_copy_(0, slots, new) * 2


HALF = "min(M * K, (N * K) / 2)"
PART = "min(M * N, (K * N) / 2)"


@pytest.mark.parametrize(
    ("function", "given", "reads", "writes"),
    [
        (scaled, (IDS, TABLE), [("N",), (HALF,)], [("N", "K")]),
        (turned, (IDS, TABLE), [("N",), ("min(M * K, (K * N) / 2)",)], [("K", "N")]),
        (both, (IDS, TABLE), [("N",), ("M", "K")], [("N", "K")]),
        (bag, (IDS, TABLE, torch.arange(0, 64, 8)), [("N",), (HALF,), ("P",)], [("P", "K")]),
        (put, (CACHE, NEW, SLOTS), [(0,), ("K", "N"), ("K",)], [(PART,)]),
        (add, (CACHE, NEW, SLOTS), [(PART,), ("K", "N"), ("K",)], [(PART,)]),
    ],
)
def test_what_must_move(function, given, reads, writes):
    trace = next(find_rooms(make_operation(function, given))).trace
    assert traffic.reads(trace) == reads
    assert traffic.writes(trace) == writes


def test_what_is_used_otherwise_counts_in_full():
    trace = next(find_rooms(make_operation(returned, (CACHE, NEW, SLOTS)))).trace
    assert traffic.reads(trace)[0] == ("M", "N")
    assert traffic.writes(trace) == [("M", "N"), ("M", "N")]


def test_a_lookup_in_a_large_table_may_be_as_fast_as_its_places(tmp_path, in_process):
    """All of the table counted, so that torch itself was at 475 % of the roofline."""
    given = torch.randint(0, 100_000, (64,)), torch.randn(100_000, 16)
    task = load_task(make_task(make_operation(scaled, given), tmp_path / "t", seeds=False).folder)
    (bench, *_) = task.gpu.bench
    assert task.min_bytes(bench) == 64 * 8 + 64 * 16 * 4 / 2 + 64 * 16 * 4
