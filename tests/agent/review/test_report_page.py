"""The report as text: what is in it, that nothing gets out of its place, how large it is."""

import base64
import gzip
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
from kagent.review import page, report_data, sources
from kagent.review.live import PageServer
from kagent.runs.lineage import Candidate, Lineage, Operator, Proposal
from kagent.runs.selftest_record import SelftestRecord
from kagent.runs.store import read_history
from kagent_sandbox.data.records import to_json
from kagent_sandbox.data.verdict import Rejected, Stage, Status
from kagent_sandbox.judge.timing.noise import Noise
from kagent_sandbox.runtime.text import printable

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


def test_the_page_says_the_result_and_holds_every_candidate(run):
    manifest, history = run
    text = page.render("softmax-ask-tell", manifest, history)
    assert "beside the best of eager and torch.compile, 1.582× (95 %: 1.576–1.587)" in text
    cases = len(history.race.race.cases)
    assert f"<strong>FASTER</strong> on {cases} of {cases} hidden cases" in text
    data = data_of(text)
    assert [c["id"] for c in data["candidates"]] == list(range(len(history.lineage)))
    assert data["winner"] == history.race.winner
    shown = data["candidates"][14]
    lines = [unescape(re.sub(r"</?i[^>]*>", "", data["lines"][n])) for n in shown["lines"]]
    assert "\n".join(lines) == history.lineage[14].proposal.source.rstrip("\n")


def test_what_a_run_stores_of_the_machine_is_told_in_words(run):
    manifest, history = run
    noise = Noise(609.0, 0.928, 0.109, 1.0, 0.3)
    tested = SelftestRecord("48aa", "x", "T2", "2026-11-22T07:40:35+0000", 345, 37, (), noise)
    found = {**manifest.environment, "selftest": to_json(tested), "noise": to_json(noise)}
    text = unescape(page.render("run", replace(manifest, environment=found), history))
    shown = re.sub(r"(?s)<(script|style).*?</\1>", "", text)
    assert shown.count(tested.text) == 2
    assert shown.count(noise.text) == 1
    assert not re.search(r"\{'|\['", shown)
    for stored in ("not run", None):
        found = {**manifest.environment, "selftest": stored, "noise": None}
        text = page.render("run", replace(manifest, environment=found), history)
        wanted = "not run on that machine with those versions" if stored else "not recorded"
        assert f"<dt>self-test</dt><dd>{wanted}</dd>" in text


def test_a_tie_is_named_on_the_page(run):
    manifest, history = run
    case, *others = history.race.race.cases
    winner = str(history.race.winner)
    ratios = [
        replace(r, value=0.9, low=0.8, high=1.2) if r.candidate == winner else r
        for r in case.ratios
    ]
    race = replace(history.race.race, cases=(replace(case, ratios=tuple(ratios)), *others))
    doubtful = replace(history, race=replace(history.race, race=race))
    assert "<strong>TIE</strong>" not in page.render("run", manifest, history)
    text = page.render("run", manifest, doubtful)
    assert re.search(r"<strong>TIE</strong> on bfloat16 .* \(0\.900×\)</p>", text)
    assert "<strong>SLOWER</strong>" not in text


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


def test_numbers_that_json_lacks_become_null():
    assert report_data.shown({"a": math.inf, "b": [math.nan, 1.5]}) == {"a": None, "b": [None, 1.5]}


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
    assert data_of(text)["roofline"] is None


def test_the_live_page_is_for_loopback_alone():
    import threading

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


def test_the_command_writes_the_page(tmp_path):
    target = tmp_path / "out.html"
    done = kagent("report", str(SOFTMAX), "-o", str(target))
    assert (done.returncode, done.stdout.strip()) == (0, str(target))
    assert target.read_text().startswith("<!doctype html>")


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
