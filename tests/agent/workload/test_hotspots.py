"""Hotspots of a script: its steps, the regions of a step, their ranking, files and pages."""

import contextlib
import importlib.util
import io
import json
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from commands import run
from kagent.workload import hotspots, observing
from kagent.workload.child import script_of
from kagent.workload.hotspots import rank, write_region
from kagent.workload.hotspots_page import kernels_tree, modules_tree, render
from kagent.workload.hotspots_view import hotspots_view
from kagent.workload.observing import _Regions
from kagent.workload.recording import StepRecorder, plain_path, statistics_of
from kagent.workload.regions import regions_of, title
from kagent.workload.steps import Done, ScriptFailed, Steps
from kagent_sandbox.data.device import Ceilings
from kagent_sandbox.errors import UserError
from rich.console import Console
from torch import nn
from torch.profiler import record_function
from workload_scripts import TRAIN

CEILINGS = Ceilings(20.0, 20.0, 20.0, {"float32": 0.1})


def recorded(function, **more):
    with StepRecorder(lambda: False, **more) as recorder:
        kept = function()
    recorder.kept = kept
    return recorder.recording


def named(recording):
    return [(r.kind, title(r, recording.ops)) for r in regions_of(recording)]


def module_of(text, folder):
    path = folder / "region.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("region", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seen(*recordings, us=1000.0, **more):
    found = _Regions(recordings[0])
    for recording in recordings:
        times = {i: us for i, op in enumerate(recording.ops) if not op.is_view}
        found.add(recording, times, len(recordings))
    return {
        "device": "cpu",
        "trains": True,
        "step_us": 20000.0,
        "busy_us": None,
        "disturbed": [],
        "launches": None,
        "compiled_us": 0.0,
        "compiled_frames": 0,
        "kernels": {},
        "regions": found.listed(),
        **more,
    }


@pytest.fixture(scope="module")
def step():
    """One step of a small model in training, recorded with statistics."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    model = nn.Sequential(block, nn.Softmax(-1))
    x = torch.randn(8, 16)
    return recorded(lambda: model(x).square().mean().backward(), statistics=True)


def test_operations_between_products_are_one_region_if_data_connect_them():
    x, w, other = torch.randn(8, 8), torch.randn(8, 8), torch.randn(8)
    recording = recorded(lambda: torch.softmax((x @ w) * 2 + 1, -1).mm(w) + other.sin() * 0)
    assert named(recording) == [
        ("product", "mm"),
        ("fused", "mul → add → _softmax"),
        ("product", "mm"),
        ("fused", "sin → mul → add"),
    ]


def test_parts_without_common_data_are_regions_of_their_own():
    x, y = torch.randn(4), torch.randn(4)
    assert named(recorded(lambda: (x.exp().neg(), y.exp().neg()))) == [("fused", "exp → neg")] * 2


def test_a_copy_is_one_also_with_a_view_of_it():
    x, w = torch.randn(4, 8), torch.randn(4, 4)
    kinds = named(recorded(lambda: x.mT.contiguous().view(-1, 4).mm(w)))
    assert kinds == [("copy", "clone"), ("product", "mm")]


def test_marks_for_a_profiler_are_no_operations():
    def marked():
        with record_function("mine"):
            return x.exp()

    x = torch.randn(4)
    assert named(recorded(marked)) == [("fused", "exp")]


def test_what_is_used_elsewhere_is_written_and_what_is_not_stays_inside():
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    recording = recorded(lambda: (x.exp() + 1).mul(x).mm(w))
    (region, _) = regions_of(recording)
    assert (region.read_bytes, region.written_bytes) == (64 * 64 * 4, 64 * 64 * 4)


def test_an_expanded_input_counts_once_and_a_gathered_table_as_what_is_read_of_it():
    x, row = torch.randn(64, 64), torch.randn(64)
    (region,) = regions_of(recorded(lambda: x * row))
    assert region.read_bytes == 64 * 64 * 4 + 64 * 4
    data = seen(recorded(lambda: F.embedding(torch.arange(4), torch.randn(1000, 8))))
    gathered = next(r for r in data["regions"] if r["title"] == "embedding")
    assert gathered["read_bytes"] == 4 * 8 * 4 + 4 * 8


def test_backward_knows_its_modules_and_layers_are_one_entry(step):
    data = seen(step)
    places = {(r["phase"], r["place"]) for r in data["regions"]}
    assert ("forward", "Sequential.*.*") in places
    assert any(phase == "backward" and place != "(no module)" for phase, place in places)
    assert plain_path("GPT.blocks.11.norm2") == "GPT.blocks.*.norm2"


def test_the_same_region_in_two_layers_is_counted_twice():
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    data = seen(recorded(lambda: (x @ w).exp().neg().mm(w).exp().neg()))
    (fused,) = (r for r in data["regions"] if r["kind"] == "fused")
    assert fused["count"] == 2
    assert fused["us"] == 4000.0


def test_a_region_written_out_computes_what_the_step_did(step, tmp_path):
    count = 0
    for region in seen(step)["regions"]:
        module = module_of(region["source"]["text"], tmp_path)
        given = module.make_inputs()
        before = [t.clone() for t in given]
        results = module.region(*given)
        results = results if isinstance(results, tuple) else (results,)
        shown = [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in results]
        assert shown == region["outputs"]
        assert [f"{str(t.dtype)[6:]}{list(t.shape)}" for t in given] == region["inputs"]
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
        count += 1
    assert count > 10


def test_writing_in_place_becomes_a_result(tmp_path):
    x = torch.ones(3, 4)
    recording = recorded(lambda: x.mul_(2).add_(1), statistics=True)
    (region,) = seen(recording)["regions"]
    module = module_of(region["source"]["text"], tmp_path)
    given = torch.full((3, 4), 5.0)
    assert torch.equal(module.region(given), torch.full((3, 4), 11.0))
    assert torch.equal(given, torch.full((3, 4), 5.0))


def test_the_sizes_of_a_normalization_vary(tmp_path):
    x, weight = torch.randn(4, 8), torch.ones(8)
    recording = recorded(lambda: F.layer_norm(x + x, (8,), weight), statistics=True)
    (region,) = seen(recording)["regions"]
    module = module_of(region["source"]["text"], tmp_path)
    x, weight = torch.randn(3, 5), torch.ones(5)
    assert torch.allclose(module.region(x, weight), F.layer_norm(x + x, (5,)))


def test_inputs_are_drawn_like_those_that_were_seen(tmp_path):
    torch.manual_seed(0)  # not every draw has both of the ends
    x = torch.rand(400, 64).mT.masked_fill(torch.rand(64, 400) < 0.25, -torch.inf)
    index = torch.randint(3, 9, (64, 1))
    recording = recorded(lambda: torch.where(index > 4, x.exp(), 0.0), statistics=True)
    (region,) = (r for r in seen(recording)["regions"] if "where" in r["title"])
    drawn = {tuple(t.shape): t for t in module_of(region["source"]["text"], tmp_path).make_inputs()}
    like = drawn[64, 400]
    assert like.stride() == x.stride()
    assert 0.2 < (like == -torch.inf).float().mean() < 0.3
    finite = like[like.isfinite()]
    assert 0.0 <= finite.min() < finite.median() < finite.max() <= 1.0
    assert (drawn[64, 1].min(), drawn[64, 1].max()) == (index.min(), index.max())


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (torch.tensor([1.0, float("nan")]), {"quantiles": [1.0] * 17, "nan": 0.5}),
        (torch.empty(0), {}),
        (torch.tensor([True, True]), {"quantiles": [1.0] * 17}),
    ],
)
def test_statistics(values, found):
    assert statistics_of(values) == found


def test_what_draws_random_numbers_is_no_task(tmp_path):
    x = torch.randn(8)
    found = rank("s", "d", CEILINGS, seen(recorded(lambda: F.dropout(x, 0.5))))
    wanted = next(r for r in found.regions if "dropout" in r.title or "bernoulli" in r.title)
    with pytest.raises(UserError, match="draws random numbers"):
        write_region(found, wanted.key, tmp_path)
    with pytest.raises(UserError, match=r"no such region: expected 1 to \d"):
        write_region(found, "99", tmp_path)


def test_ranking_is_by_time_above_the_ceilings(step):
    found = rank("s", "d", CEILINGS, seen(step))
    rooms = [r.headroom_us for r in found.regions]
    assert rooms == sorted(rooms, reverse=True)
    assert [r.number for r in found.regions] == list(range(1, len(rooms) + 1))
    first = found.regions[0]
    assert first.step_gain == pytest.approx(20000 / (20000 - first.headroom_us))
    assert found.ops_us <= found.step_us * 1.0001


def test_ids_are_shown_on_a_narrow_terminal(step):
    found = rank("s", "d", CEILINGS, seen(step))
    narrow = Console(width=80, record=True, file=io.StringIO())
    narrow.print(hotspots_view(found, 5))
    text = narrow.export_text()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert all(r.key in text for r in found.regions[:5])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"device": "gpu", "busy_us": 4000.0, "launches": 90.0}, "bound by launches .* 80%"),
        ({"disturbed": ["other programs used 1.5 cores"]}, "^disturbed: other programs used 1.5"),
        ({"step_us": 2e6}, "bound by the host: "),
        ({"compiled_frames": 2}, "torch.compile has 2 functions"),
    ],
)
def test_a_step_says_what_it_is_bound_by(step, more, words):
    assert re.search(words, "\n".join(rank("s", "d", CEILINGS, seen(step, **more)).notes))


def test_copies_are_named_where_they_are_much():
    x = torch.randn(8)
    data = seen(recorded(lambda: [torch.cat([x, x]) for _ in range(9)]), step_us=1e4)
    assert rank("s", "d", CEILINGS, data).notes[0].startswith("bound by copy: 90% of the step")


def test_icicles_have_all_of_the_time(step):
    found = rank("<script>.py", "d", CEILINGS, seen(step))

    def check(node):
        below = sum(map(check, node["children"]))
        assert not node["children"] or below == pytest.approx(node["us"], rel=1e-2)
        return node["us"]

    assert check(modules_tree(found)) == pytest.approx(found.step_us)
    assert check(kernels_tree(found)) == pytest.approx(found.ops_us)
    page = render(found)
    assert "&lt;script&gt;.py" in page
    assert "<script>.py" not in page


class Ends:
    """Notes the ends of steps."""

    def __init__(self):
        self.ends = []

    def step_ends(self, index, optimizer, output):
        self.ends.append((index, optimizer is not None))

    def call_begins(self):
        pass

    def optimizer_begins(self, optimizer):
        pass


def test_steps_end_with_the_first_optimizer_that_steps():
    model, ends = nn.Linear(2, 2), Ends()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    with Steps(ends) as steps:
        for _ in range(2):
            with torch.no_grad():
                model(torch.ones(2))  # a look at the model before it trains is no step of training
            model(torch.ones(2)).sum().backward()
            first.step()
            second.step()
        assert steps.seen == 2
    assert ends.ends[-2:] == [(0, True), (1, True)]


def test_steps_of_inference_end_with_the_outermost_module():
    model, ends = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Ends()
    with Steps(ends), torch.no_grad():
        for _ in range(3):
            model(torch.ones(2))
    assert ends.ends == [(0, False), (1, False), (2, False)]


def test_a_step_of_inference_mode_is_recorded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(-1))
    observer = observing._Observer(0, 1)

    def run():
        for _ in range(observer.needed):
            with torch.inference_mode():
                model(torch.ones(2, 2))

    with Steps(observer), contextlib.suppress(Done):
        run()
    observer.close()
    result = observer.result()
    assert not result["trains"]
    titles = {r["title"] for r in result["regions"]}
    assert {"addmm", "_softmax"} <= titles


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.nightly
def test_a_script_from_the_command_line(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hotspots, "device_ceilings", lambda: ("a device", CEILINGS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    page, folder = tmp_path / "page.html", tmp_path / "taken"
    words = ("hotspots", script, "--steps", 2, "--warmup", 0, "--json")
    ended = run(
        monkeypatch, capsys, *words, "--page", page, "--take", 1, "--to", folder, "--", "99"
    )
    assert ended.code == 0, ended.err
    data = json.loads(ended.out)
    assert data["trains"]
    assert all(r["takes"] for r in data["regions"])  # whichever is the first, by its time
    titles = {(r["phase"], r["place"], r["title"], r["count"]) for r in data["regions"]}
    assert ("forward", "Model.blocks.*", "mul → _softmax → gelu", 2) in titles
    assert sum(r["us"] for r in data["regions"]) <= data["step_us"] * 1.0001
    assert page.read_text().startswith("<!doctype html>")
    assert data["taken"] == str(folder / f"region_{data['regions'][0]['key']}.py")
    assert "def make_inputs" in (folder / f"region_{data['regions'][0]['key']}.py").read_text()


@pytest.mark.nightly
def test_a_script_that_ends_too_early_says_so(script, monkeypatch, capsys):
    monkeypatch.setattr(hotspots, "device_ceilings", lambda: ("a device", CEILINGS))
    ended = run(monkeypatch, capsys, "hotspots", script, "--steps", 2, "--", "3")
    assert ended.code == 2
    assert "it must run at least 11 steps, and ended after 3: give --steps or --warmup" in ended.err


def test_a_script_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(hotspots, "device_ceilings", lambda: ("a device", CEILINGS))
    ended = run(monkeypatch, capsys, "hotspots", "nowhere.py")
    assert (ended.code, "nowhere.py: no such file" in ended.err) == (2, True)


@pytest.mark.parametrize(
    ("text", "frames"),
    [("def f(:\n", 0), ("def f():\n    raise ValueError\nf()\n", 2)],
)
def test_a_script_that_fails_shows_its_own_frames_alone(
    tmp_path, monkeypatch, capsys, text, frames
):
    path = tmp_path / "train.py"
    path.write_text(text)
    monkeypatch.setattr("sys.path", sys.path[:])
    monkeypatch.setattr("sys.argv", sys.argv)
    with pytest.raises(ScriptFailed):
        script_of({"script": str(path), "args": []})()
    said = capsys.readouterr().err
    assert said.count(", in ") == frames
    assert "runpy" not in said
    assert "child.py" not in said


def test_an_interrupted_script_ends_quietly(tmp_path):
    script, asked, told = (tmp_path / n for n in ("train.py", "asked", "told"))
    script.write_text("raise KeyboardInterrupt\n")
    given = {"script": str(script), "args": [], "observer": "observing", "kind": "auto"}
    asked.write_text(json.dumps({**given, "warmup": 0, "steps": 1, "seed": 0}))
    command = [sys.executable, "-m", "kagent.workload.child", str(asked), str(told)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert not told.exists()
