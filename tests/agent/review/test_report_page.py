"""The report as text: what is in it, that nothing gets out of its place, how large it is."""

import base64
import gzip
import itertools
import json
import math
import re
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kagent.review import live, page, plots, report_data, sources, summary
from kagent.review.lineage_rows import LineageRow, lineage_rows
from kagent.review.live import PageServer
from kagent.review.scales import RatioScale, whole_ticks
from kagent.runs.lineage import Candidate, Lineage, Operator, Proposal
from kagent.runs.selftest_record import SelftestRecord
from kagent.runs.store import read_history
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.verdict import Passed, Rejected, Stage, Status
from kagent_sandbox.judge.timing.noise import Noise
from kagent_sandbox.runtime.text import printable
from synthetic_lineages import SEED, child, with_compiler_output

RUNS = Path(__file__).parents[3] / "runs"
SOFTMAX = RUNS / "softmax-ask-tell"


@pytest.fixture(scope="module")
def run():
    store, history = read_history(SOFTMAX)
    return store.manifest, history


def data_of(text):
    packed = re.search(r'id="data">([^<]*)<', text)[1]
    return json.loads(gzip.decompress(base64.b64decode(packed)))


@given(st.text(st.characters(exclude_categories=())))
def test_highlighting_shows_every_character(text):
    text = printable(text).rstrip("\n")
    shown = [unescape(re.sub(r"</?i[^>]*>", "", line)) for line in sources.highlighted(text)]
    assert "\n".join(shown) == text


lists = st.lists(st.integers(0, 5), max_size=12)


@given(lists, lists)
def test_edits_turn_one_list_of_lines_into_the_other(before, after):
    made, at = [], 0
    for i1, i2, j1, j2 in sources.changes(before, after):
        made += before[at:i1] + after[j1:j2]
        at = i2
    assert made + before[at:] == after


def test_lines_that_sources_share_are_stored_once():
    lines = sources.Lines()
    first, second = lines.add("a = 1\nb = 2"), lines.add("b = 2\na = 1")
    assert first == second[::-1]
    assert len(lines.html) == 2


def words(text, part="body"):
    """What a reader sees of a part of the page, with one space between words."""
    found = re.search(rf'(?s)<(section|body)[^>]*id="{part}".*?</\1>', text)
    shown = re.sub(r"(?s)<(script|style).*?</\1>|<[^>]*>", " ", found[0] if found else text)
    return " ".join(unescape(shown).split())


def test_the_page_says_the_result_and_holds_every_candidate(run):
    manifest, history = run
    text = page.render("softmax-ask-tell", manifest, history)
    first = words(text, "result")
    assert "FASTER 1.582× the best of eager and torch.compile" in first
    assert "95 %: 1.576–1.587, P(faster) 1.00, final race on 4 hidden cases" in first
    assert "winner: #14 cuda_persistent on NVIDIA H100" in first
    assert "FASTER on 4 of 4 hidden cases" in first
    assert "visible cases, the search's estimate: above torch on all 6, the least on" in first
    for edit in ("#1 seed triton_online start", "#5 rewrite every case", "1.401×", "1.018×"):
        assert edit in first
    data = data_of(text)
    assert [c["id"] for c in data["candidates"]] == list(range(len(history.lineage)))
    shown = data["candidates"][14]
    lines = [unescape(re.sub(r"</?i[^>]*>", "", data["lines"][n])) for n in shown["lines"]]
    assert "\n".join(lines) == history.lineage[14].proposal.source.rstrip("\n")


def test_what_a_run_stores_of_the_machine_is_told_in_words(run):
    manifest, history = run
    noise = Noise(609.0, 0.928, 0.109, 1.3, 0.3)
    tested = SelftestRecord("48aa", "x", "T2", "2026-11-22T07:40:35+0000", 345, 37, ("12",), noise)
    attacks = {"read a file": "PermissionError", "see processes": None}
    found = {"selftest": to_json(tested), "noise": to_json(noise), "canaries": attacks}
    told = {t.name: t for t in summary.trust({**manifest.environment, **found}, history)}
    assert (told["noise"].mark, told["noise"].text) == (
        "caution",
        "a kernel against itself came out at 0.928×, and single pairs of its blocks differed by "
        "11%; that is worse than known machines: all intervals are 1.3× wider",
    )
    assert told["isolation"].mark == "ok"
    assert told["isolation"].text.endswith("; 1 of 2 attacks from inside were stopped")
    assert told["selftest"].mark == "bad"
    assert told["selftest"].text.startswith("the judge was right on 344 of 345 attacks")
    assert "baselines" not in told
    text = page.render(
        "run", replace(manifest, environment={**manifest.environment, **found}), history
    )
    assert words(text, "environment").count(tested.text) == 1
    assert words(text, "environment").count(noise.text) == 1
    assert not re.search(r"\{'|\['", words(text))
    for stored, mark in (("not run", "caution"), (None, "unknown")):
        told = {t.name: t.mark for t in summary.trust({"selftest": stored}, history)}
        assert told == {
            "noise": "unknown", "disturbance": "ok", "isolation": "unknown", "selftest": mark,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("ratio", "pairs", "mark"), [(1.01, 0.3, "ok"), (1.1, 0.3, "caution"), (1.0, 0.77, "caution")]
)
def test_a_noisy_machine_calls_for_caution(run, ratio, pairs, mark):
    noise = to_json(Noise(609.0, ratio, pairs, 1.0, 0.3))
    told = {t.name: t for t in summary.trust({"noise": noise}, run[1])}["noise"]
    assert told.mark == mark
    assert ("shows large differences only" in told.text) == (mark == "caution")


def test_there_is_no_winner_without_a_verdict_that_it_is_faster(run):
    manifest, history = run
    seed = Lineage([SEED])
    text = words(page.render("run", manifest, replace(history, lineage=seed, race=None)))
    assert "The path to #0, edit by edit" in text
    assert "#0 is one of the task's seeds: it has no edits." in text
    assert "winner" not in text.lower()


def test_a_session_under_a_weaker_tier_is_said(run):
    manifest, history = run
    weaker = replace(history.events[-1], kind="isolation", data={"began": "T1", "tier": "T0"})
    later = replace(history, events=(*history.events, weaker))
    told = {t.name: t for t in summary.trust(manifest.environment, later)}["isolation"]
    assert told.mark == "caution"
    assert told.text.endswith("; a later session ran under T0")


def changed_race(history, change):
    """The same run with its race's first case changed."""
    case, *others = history.race.race.cases
    race = replace(history.race.race, cases=(change(case), *others))
    return replace(history, race=replace(history.race, race=race))


def test_what_disturbed_the_race_is_said_before_the_search(run):
    manifest, history = run
    found = changed_race(history, lambda c: replace(c, notes=("the host was busy",)))
    told = {t.name: t for t in summary.trust(manifest.environment, found)}["disturbance"]
    assert told.mark == "caution"
    assert told.text.startswith("in 1 of 4 cases of the final race: the host was busy; none of ")


def test_disturbances_that_differ_in_numbers_are_said_once():
    notes = [
        "others used 9.5 cores",
        "GPU at 80 C",
        "others used 12 cores",
        "others used 1.2 cores",
    ]
    assert summary.worst_of_each_kind(notes) == ["others used 12 cores", "GPU at 80 C"]


@pytest.mark.parametrize(("high", "word"), [(1.2, "TIE"), (0.95, "SLOWER")])
def test_a_tie_and_a_loss_are_named_on_the_first_screen(run, high, word):
    _, history = run
    assert [loss.word for loss in summary.losses(history)] == ["FASTER", ""]
    bounds = {"value": 0.9, "low": 0.8, "high": high}
    found = changed_race(
        history, lambda c: replace(c, ratios=tuple(replace(r, **bounds) for r in c.ratios))
    )
    named = {loss.word: loss.text for loss in summary.losses(found)}
    assert named["FASTER"] == "on 3 of 4 hidden cases"
    assert named[word] == "on bfloat16 M=12631 N=16384 (0.900×)"


def test_a_baseline_that_did_not_run_is_said_beside_the_verdict(run):
    _, history = run
    found = changed_race(history, lambda c: replace(c, missing={"compile": "out of memory"}))
    assert summary.headline(found).text == "the best of torch that ran"
    told = {t.name: t for t in summary.trust({}, found)}
    assert told["baselines"].mark == "caution"
    assert told["baselines"].text.startswith("compile did not run on 1 of 4 cases")
    notes = plots.race_notes(found.race, found.lineage)
    assert notes == ["compile did not run on bfloat16 M=12631 N=16384: out of memory"]


def test_no_race_is_no_verdict(run):
    manifest, history = run
    text = page.render("run", manifest, replace(history, race=None))
    first = words(text, "result")
    assert "NO VERDICT there was no final race yet" in first
    assert "best so far: #14" in first
    assert not re.search("FASTER|TIE|SLOWER", first)
    failed = replace(history, race=replace(history.race, winner=None))
    first = words(page.render("run", manifest, failed), "result")
    assert "NO VERDICT every finalist failed on the hidden cases" in first


def test_many_edits_are_the_largest_and_the_rest_together(run, monkeypatch):
    _, history = run
    monkeypatch.setattr(summary, "MOST_EDITS", 2)
    found = summary.edits(history, [1, 5, 9, 14])
    assert [(e.id, e.text) for e in found if e.id != 5] == [
        (1, "triton_online"),
        (None, "2 smaller edits together"),
    ]
    gains = [history.lineage.gain(i) for i in (9, 14)]
    assert found[-1].gain == pytest.approx(math.prod(gains))


def test_the_race_and_the_search_share_no_chart(run):
    _, history = run
    race = plots.race_plot(history.race, history.lineage)
    search = plots.visible_plot(history)
    assert {row.tone for group in search.groups for row in group.rows} == {"none"}
    assert not any(row.whisker for group in search.groups for row in group.rows)
    assert all(row.whisker for group in race.groups for row in group.rows)
    raced = plots.race_shares(history.race, history.lineage, matrix=False)
    searched = plots.search_shares(history, matrix=False)
    names = [[g.name for g in plot.groups] for plot in (race, search, raced, searched)]
    assert not set(names[0] + names[2]) & set(names[1] + names[3])


def test_baselines_have_one_order_everywhere(run):
    _, history = run
    order = ["eager", "compile", "compile max-autotune"]
    first, *cases = plots.race_plot(history.race, history.lineage).groups
    assert [r.name for r in first.rows][:4] == ["best of torch, case by case", *order]
    assert [[r.name.partition(",")[0] for r in case.rows] for case in cases] == [order] * 4


ratios = st.floats(1e-6, 1e6)


@given(st.lists(ratios, max_size=6), st.sampled_from([10.0, 16.0, 30.0]))
def test_an_axis_has_room_for_its_values_and_its_labels(values, apart):
    scale = RatioScale.around([None, *values])
    assert all(0 < scale.at(v) < 100 for v in values)
    ticks = scale.ticks(apart)
    assert (scale.at(1.0), "1×") in ticks
    assert all(b[0] - a[0] >= apart for a, b in itertools.pairwise(ticks))
    assert whole_ticks(len(values), 8)[0] == 0


@pytest.mark.parametrize(
    ("low", "high", "apart", "labels"),
    [
        (0.98, 1.63, 16.0, ["1×", "1.2×", "1.4×", "1.6×"]),
        (0.69, 1.35, 10.0, ["0.7×", "0.8×", "0.9×", "1×", "1.1×", "1.2×", "1.3×"]),
        (0.95, 3.3, 16.0, ["1×", "2×", "3×"]),
        (0.9, 120, 16.0, ["1×", "3×", "10×", "30×", "100×"]),
    ],
)
def test_an_axis_has_even_labels(low, high, apart, labels):
    assert [text for _, text in RatioScale(low, high).ticks(apart)] == labels


def test_what_waits_is_on_the_first_screen(run):
    manifest, history = run
    pending = [Proposal(17 + i, (0,), Operator.TUNE, "cuda_x", "", "") for i in range(8)]
    text = page.render("run", manifest, replace(history, pending=tuple(pending)))
    first = words(text, "result")
    assert "waiting for a verdict: #17 cuda_x, #18" in first
    assert "#22 cuda_x and 2 more" in first
    assert "waiting" not in words(page.render("run", manifest, history), "result")


def test_languages_have_their_titles(run):
    assert plots.search_plot(run[1].lineage).titles == ["CUDA", "Triton"]


def test_noise_calls_for_caution_where_all_was_disturbed(run):
    noise = {"noise": to_json(Noise(609.0, 1.01, 0.29, 1.0, 0.3))}
    told = {x.name: x.mark for x in summary.trust(noise, run[1])}
    assert told["noise"] == "ok"
    disturbed = Lineage(
        replace(c, verdict=replace(c.verdict, notes=("others used 1.5 cores",)))
        for c in run[1].lineage
    )
    told = {x.name: x.mark for x in summary.trust(noise, replace(run[1], lineage=disturbed))}
    assert told["noise"] == "caution"


def test_a_lineage_has_its_path_as_the_trunk():
    def candidate(i, *parents):
        operator = Operator.TUNE if parents else Operator.SEED
        return Candidate(
            Proposal(i, parents, operator, "k", f"# {i}\n", ""),
            Passed(timings=(), errors=(), score=1.0, score_stderr=0.1),
        )

    # 0 ── 1, 2 ── 3 ── 5, 6; 4 is another seed; the winner is 3.
    lineage = Lineage(candidate(*c) for c in [(0,), (1, 0), (2, 0), (3, 2), (4,), (5, 3), (6, 3)])
    rows = lineage_rows(lineage, [0, 2, 3])
    assert [(row.id, row.guides) for row in rows] == [
        (0, ("passed down-path",)),
        (1, ("tee up-path down-path", "passed")),
        (2, ("passed up-path down-path",)),
        (3, ("passed up-path down",)),  # its children are not on the path
        (6, ("tee up down", "passed")),
        (5, ("passed up",)),
        (4, ("passed",)),
    ]
    assert [row.id for row in rows if row.on_path] == [0, 2, 3]
    refused = Rejected(Stage.BUILD, Status.POLICY, "")
    rejected = replace(candidate(1, 0), verdict=refused)
    leaves = lineage_rows(Lineage([candidate(0), rejected, candidate(2, 0)]), [0])
    assert leaves[-1] == LineageRow(("passed up",), 2)  # the fastest goes on, not the first
    chain = Lineage(candidate(i, *([i - 1] if i else [])) for i in range(1500))
    assert {len(row.guides) for row in lineage_rows(chain, [0])} == {1}


def test_the_page_asks_no_network_and_runs_its_own_scripts_alone(run):
    text = page.render("softmax-ask-tell", *run)
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src &#39;none&#39;" in policy
    assert "connect-src &#39;none&#39;" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]


HOSTILE = "</script><script>document.title='out'</script><img src=x onerror=alert(1)>"


def hostile(history):
    """A run whose texts all try to become markup."""
    proposal = Proposal(
        id=len(history.lineage), parents=(0,), operator=Operator.REWRITE, name=HOSTILE,
        source=f"# {HOSTILE}\n", hypothesis=HOSTILE,
    )  # fmt: skip
    rejected = Rejected(Stage.BUILD, Status.COMPILE_ERROR, HOSTILE, HOSTILE)
    return replace(history, lineage=Lineage([*history.lineage, Candidate(proposal, rejected)]))


def test_texts_of_models_stay_texts(run):
    manifest, history = run
    text = page.render(HOSTILE, manifest, hostile(history))
    assert "<img src=x" not in text
    assert "<script>document.title" not in text
    assert data_of(text)["candidates"][-1]["message"] == HOSTILE


def test_texts_of_others_can_be_seen(run):
    manifest, history = run
    evil = "a\x00\x1b[2J\u202eb\u2066\x85"
    proposal = Proposal(
        id=len(history.lineage), parents=(0,), operator=Operator.REWRITE, name=evil,
        source=f"# {evil}\nx = 1\n", hypothesis=evil,
    )  # fmt: skip
    rejected = Rejected(Stage.BUILD, Status.COMPILE_ERROR, evil, evil)
    changed = replace(history, lineage=Lineage([*history.lineage, Candidate(proposal, rejected)]))
    text = page.render(evil, replace(manifest, task=evil), changed)
    seen = r"a\x00\x1b[2J\u202eb\u2066\x85"
    data = data_of(text)
    drawn = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    unseen = {"\x00", "\x1b", "\u202e", "\u2066", "\x85"}
    assert unseen.isdisjoint(drawn + json.dumps(data, ensure_ascii=False))
    last = data["candidates"][-1]
    assert [last[k] for k in ("name", "hypothesis", "message", "case")] == [seen] * 4
    assert data["lines"][last["lines"][0]] == f'<i class="c1"># {seen}</i>'
    assert seen in text


def test_compilers_words_and_loops_are_in_the_data_of_the_page(run):
    manifest, history = run
    lineage = Lineage([with_compiler_output(SEED), replace(child(1, 90.0), facts=None)])
    data = report_data.page_data(manifest, replace(history, lineage=lineage, race=None))
    said, plain = data["candidates"]
    assert said["remarks"] == ["rows: ptxas: (C7511) wgmma.mma_async instructions are serialized"]
    assert said["loops"][0].startswith("rows at 0x40: 9 instructions")
    assert "remarks" not in plain


def test_numbers_that_json_lacks_become_null():
    assert report_data.shown({"a": math.inf, "b": [math.nan, 1.5]}) == {"a": None, "b": [None, 1.5]}


@pytest.mark.nightly
def test_a_run_of_200_candidates_stays_below_2_mb(run):
    manifest, history = run
    originals = list(history.lineage)
    more = []
    for number in range(len(originals), 200):
        old = originals[3 + number % (len(originals) - 3)]
        changed = old.proposal.source.replace(" = ", f" =  # {number}\n  ", 25)
        more.append(
            replace(
                old,
                proposal=replace(
                    old.proposal, id=number, parents=(number - 1,), source=changed + f"# {number}\n"
                ),
            )
        )
    longer = replace(history, lineage=Lineage([*originals, *more]))
    assert len(page.render("long", manifest, longer).encode()) < 2_000_000


def test_a_run_without_a_candidate_has_a_page(run):
    manifest, history = run
    empty = replace(history, lineage=Lineage(), race=None, events=(), baselines=None)
    text = page.render("empty", manifest, empty)
    assert "No candidate has passed yet" in text
    assert data_of(text)["candidates"] == []


def test_a_page_of_hundreds_of_candidates_highlights_each_source_once():
    texts = [f"x = {number}  # of a long search\n" for number in range(600)]
    misses = []
    for _ in range(2):  # the page is asked for again
        lines = sources.Lines()
        for text in texts:
            lines.add(text)
        misses.append(sources.highlighted.cache_info().misses)
    assert misses[0] == misses[1]
    assert len(lines.html) == 600


def test_a_run_that_is_gone_is_an_answer_of_the_live_page(tmp_path, capfd):
    import threading

    with PageServer(tmp_path / "gone") as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"{server.url}seq")
            assert refused.value.code == 500
            assert "gone" in refused.value.read().decode()
        finally:
            server.shutdown()
            thread.join()
    assert "Traceback" not in capfd.readouterr().err


def test_the_live_page_is_for_loopback_alone(monkeypatch):
    import threading

    reads = iter([read_history])  # of the page alone: its number is asked for every two seconds
    monkeypatch.setattr(live, "read_history", lambda folder: next(reads)(folder))
    with PageServer(SOFTMAX) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            assert server.server_address[0] == "127.0.0.1"
            with urllib.request.urlopen(f"{server.url}seq") as answer:
                seq = answer.read().decode()
            assert int(seq) > 0
            with urllib.request.urlopen(server.url) as answer:
                assert f'data-live="{seq}"' in answer.read().decode()
            for path, headers, code in (
                ("../../etc/passwd", {}, 404),
                ("", {"Host": "evil.example"}, 403),
            ):
                asked = urllib.request.Request(server.url + path, headers=headers)
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(asked)
                assert refused.value.code == code
            asked = urllib.request.Request(server.url, data=b"x", method="POST")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked)
            assert refused.value.code == 501
        finally:
            server.shutdown()
            thread.join()


def kagent(*words):
    command = [sys.executable, "-m", "kagent", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.usefixtures("warm_processes")
def test_the_command_writes_the_page(tmp_path):
    target = tmp_path / "out.html"
    done = kagent("report", str(SOFTMAX), "-o", str(target))
    assert (done.returncode, done.stdout.strip()) == (0, str(target))
    assert target.read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("report", "nowhere"), "no run 'nowhere'"),
        (("report", str(SOFTMAX), "-o", "/nowhere/x.html"), "cannot be written"),
        (("report", str(SOFTMAX), "--live", "-o", "x.html"), "omit --output"),
        (("diff", str(SOFTMAX), "0", "99"), "no candidate 99"),
    ],
)
def test_what_cannot_be_done_is_one_clear_line(words, says):
    done = kagent(*words)
    assert done.returncode != 0
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def with_needs(lineage, needs):
    """The lineage, whose candidates need so many bytes in their first case and 1 in the others."""

    def needing(c):
        (first, *others), most = c.verdict.timings, needs[c.id]
        timings = (replace(first, peak_bytes=most), *(replace(t, peak_bytes=1) for t in others))
        return replace(c, verdict=replace(c.verdict, timings=timings))

    return Lineage(needing(c) if c.id in needs else c for c in lineage)


def test_the_front_of_time_against_memory(run):
    """What is slower than another that needs as little is not on it."""
    manifest, history = run
    ranked = sorted(history.lineage.passed(), key=lambda c: -history.lineage.log_speed(c.id))
    fastest, slowest = ranked[0], ranked[-1]
    needs = {c.id: 4 << 20 for c in ranked}
    needs[slowest.id] = 1 << 20
    lineage = with_needs(history.lineage, needs)
    rows = plots.memory_front(lineage)
    assert [(r.id, r.memory) for r in rows] == [(fastest.id, "4 MiB"), (slowest.id, "1 MiB")]
    text = page.render("x", manifest, replace(history, lineage=lineage))
    assert f"#{slowest.id} {slowest.proposal.name}" in words(text, "search")
    assert 'id="memory-front"' in text
    same = with_needs(history.lineage, dict.fromkeys(needs, 7))
    assert plots.memory_front(same) == []
    alike = with_needs(history.lineage, {**needs, slowest.id: (4 << 20) - 1})
    assert plots.memory_front(alike) == []
