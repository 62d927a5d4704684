"""The figures of benchmarks/gpu_scaling.py, from runs that are stored."""

import pytest
from gpu_scaling import Rates, Search, replies_of
from kagent.runs.store import read_history
from simulated_evolution import stored_run


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    return Search.of(read_history(stored_run(tmp_path_factory.mktemp("run"), budget=12))[1])


def test_a_search_lasts_from_its_first_question_to_its_last_verdict(search):
    ((begin, end),) = search.spans
    asked = [e.at for e in search.history.events if e.kind == "asked"]
    assert begin == min(asked)
    assert end == max(e.at for e in search.history.events if e.kind == "recorded")
    assert len(search.answers) == search.history.lineage.counted == 12
    replies, build_s = replies_of([search])
    assert 0 <= replies.not_built <= 1
    assert 0 <= replies.in_full <= 1
    assert build_s >= 0


def test_devices_that_do_the_same_are_so_many_times_one(search):
    rates, said = Rates(1.0, 12), []
    rates.add("campaign", 1, [search], 2 * search.seconds, said.append)
    rates.add("campaign", 2, [search, search], 2 * search.seconds, said.append)
    one, two = rates.all
    assert (two.devices, two.judged, two.evaluations) == (2, 2, 24)
    assert two.searching == pytest.approx(0.5)
    assert two.replies_an_hour == pytest.approx(2 * one.replies_an_hour)
    assert two.searching_an_hour == pytest.approx(2 * two.replies_an_hour)
    assert two.simulated > 1.5 * one.simulated
    head, *rows = rates.table()
    assert [row.split()[1] for row in rows] == ["1", "2"]
    assert rows[1].split().count("100%") == 2
    assert {len(row) for row in (head, *rows)} == {len(head)}


def test_a_search_that_judged_nothing_is_no_rate(tmp_path):
    empty = Search.of(read_history(stored_run(tmp_path, budget=0))[1])
    rates, said = Rates(1.0, 12), []
    rates.add("judges", 1, [empty], None, said.append)
    assert (rates.all, len(list(rates.table()))) == ([], 1)
    assert "nothing was judged" in said[0]
