"""The figures of benchmarks/gpu_scaling.py, from runs that are stored."""

import asyncio
import json

import pytest
from gpu_scaling import Rates, Report, Search, replies_of
from kagent.runs.store import read_history
from simulated_evolution import RandomProposer, evolution, stored_run


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


class TwiceEach(RandomProposer):
    """Says everything twice."""

    resamples = 0
    said = None

    async def propose(self, ask):
        again, self.said = self.said, None
        if again is None:
            again = self.said = await super().propose(ask)
        return again


def test_what_a_model_says_again_is_no_reply(tmp_path):
    proposer = TwiceEach()
    search, store = evolution(tmp_path / "task", tmp_path, budget=8, proposer=proposer, in_flight=1)
    with store:
        asyncio.run(search.run())
    found = Search.of(read_history(store.folder)[1])
    assert found.repeated > 0
    assert not any(c.is_duplicate for c in found.answers)
    rates, said = Rates(1.0, 12), []
    rates.add("judges", 1, [found], None, said.append)
    assert (rates.all[0].replies, rates.all[0].evaluations) == (len(found.answers), 8)
    assert f"{found.repeated} answers, which do not count" in said[1]


def test_a_part_that_fails_is_told_and_the_next_one_begins(tmp_path, search):
    report = Report(Rates(1.0, 12), {"gpus": 2}, tmp_path / "out", limit_s=60.0)
    with report.part("one") as begins:
        assert begins
        raise RuntimeError("no such GPU")
    with report.part("two") as begins:
        assert begins
        report.rates.add("judges", 1, [search], None, report.tell)
        before = json.loads((tmp_path / "out" / "gpu_scaling.json").read_text())
    assert (before["failed"], before["rates"]) == (1, [])  # written after each part
    after = json.loads((tmp_path / "out" / "gpu_scaling.json").read_text())
    assert (after["gpus"], after["failed"], len(after["rates"])) == (2, 1, 1)
    text = (tmp_path / "out" / "gpu_scaling.txt").read_text()
    assert "no such GPU" in text
    assert "12 evaluations" in text


def test_no_part_begins_after_the_limit():
    report = Report(Rates(1.0, 12), {}, None, limit_s=-1.0)
    with report.part("late") as begins:
        assert not begins
    assert report.failed == 0
