import json

import pytest
import torch
from commands import run as run_command
from custom_tasks import candidate, write
from kagent.authoring import calibrate as module
from kagent.authoring.calibrate import calibrate
from kagent.authoring.draft.cases import make_draft
from kagent.authoring.draft.orders import ORDERS, Reordered
from kagent.authoring.draft.rooms import find_rooms
from kagent.authoring.draft.trial import write as draft_files
from kagent.authoring.tracing.operation import make_operation
from kagent_sandbox.data.calibration import Calibration, read_calibration, write_calibration
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.cpu.facts import cpu_facts
from kagent_sandbox.errors import TaskError

TOML = """
dims = { M = "rows", N = "columns" }
arguments = [{ name = "x", shape = ["M", "N"] }]
results = [
  { name = "y", shape = ["M"], row_dims = 0, k = 2.0, floor = 1.0 },
  { name = "at", shape = ["M"], dtype = "int64", k = 1.0 },
]

[[cpu.check]]
name = "small"
dtype = "bfloat16"
M = 5
N = 33

[[cpu.bench]]
name = "wide"
dtype = "float32"
M = 8
N = 4096
"""
REFERENCE = """
def inputs(case, generator, device):
    shape = (case.dims["M"], case.dims["N"])
    x = torch.rand(shape, generator=generator, device=device)
    return {"x": x.to(getattr(torch, case.dtype))}

def reference(*, x):
    return x.double().sum(-1), x.argmax(-1)

def eager(*, x):
    return x.sum(-1)%s, x.argmax(-1)
"""


SEED_CODE = """
extern "C" void sums(const float* x, float* y, int64_t* at, int64_t m, int64_t n) {
  for (int64_t i = 0; i < m; ++i) {
    float sum = 0;
    int64_t best = 0;
    for (int64_t j = 0; j < n; ++j) {
      sum += x[i * n + j];
      if (x[i * n + j] > x[i * n + best]) best = j;
    }
    y[i] = sum;
    at[i] = best;
  }
}
"""
SEED_HOST = """
def run(x):
    y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    at = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    cpp_kernel("sums", SOURCE)(x, y, at, x.shape[0], x.shape[1])
    return y, at
"""


def task_of(folder, wrong=""):
    return write(folder / "sums", TOML, REFERENCE % wrong)


@pytest.fixture
def ways(monkeypatch):
    """All but torch.compile, which takes seconds."""
    all_ways = module._ways
    monkeypatch.setattr(
        module, "_ways", lambda d: {n: w for n, w in all_ways(d).items() if n != "torch.compile"}
    )


def quiet(text):
    pass


@pytest.mark.parametrize("function", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_what_accumulates_does_so_in_a_tree(function):
    x = torch.full((3, 127), 0.983)
    exact, plain = function(x.double(), 1), function(x, 1)
    with Reordered(*ORDERS["reversed sums"][:1], pairs=False):
        other = function(x, 1)
        whole = torch.arange(1, 6).cumsum(0)
        half = function(x.bfloat16(), 1)
    torch.testing.assert_close(other.double(), exact, rtol=127 * 2**-24, atol=0)
    assert not torch.equal(other, plain)
    assert whole.tolist() == [1, 3, 6, 10, 15]
    torch.testing.assert_close(half, function(x.bfloat16().float(), 1).bfloat16())


@pytest.mark.parametrize("order", ORDERS)
def test_another_order_is_as_right_and_rounds_otherwise(order):
    split, pairs = ORDERS[order]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(65, 65, generator=generator) for _ in range(2))
    ways = {
        "sum": lambda: a.sum(-1),
        "all": lambda: a.sum(),
        "mean": lambda: a.mean(0, keepdim=True),
        "product": lambda: a @ b,
        "biased": lambda: torch.addmm(b[0], a, b),
        "softmax": lambda: (30 * a).softmax(-1),
        "norm": lambda: torch.nn.functional.layer_norm(a, (65,)),
        "variance": lambda: a.var((0, 1), correction=0),
        "deviation": lambda: a.std(0, keepdim=True),
        "both": lambda: torch.cat(torch.var_mean(a.T.bfloat16(), -1, keepdim=True)),
    }
    different = set()
    for name, compute in ways.items():
        plain = compute()
        with Reordered(split, pairs=pairs):
            other = compute()
        room = 1e-4 if plain.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(other, plain, rtol=room, atol=room)
        if not torch.equal(other, plain):
            different.add(name)
    assert {"sum", "product", "norm", "deviation"} <= different


def test_tolerances_leave_room_for_every_way_and_are_applied(tmp_path, ways):
    task = task_of(tmp_path)
    found = calibrate(task, "cpu", quiet)
    assert set(found.results) == {"y"}
    assert found.device == cpu_facts().name
    y = found.results["y"]
    assert y.k >= 2
    assert 1 <= y.floor <= 64
    assert " in case " in y.why
    assert set(ORDERS) < set(found.ways)
    write_calibration(task.folder, Calibration({"cpu": found}))
    again = load_task(task.folder)
    assert again.digest == task.digest
    assert [(r.k, r.floor) for r in again.calibrated("gpu").compared] == [(2.0, 1.0), (1.0, 1.0)]
    assert again.compared[0].k == 2.0
    applied = again.calibrated("cpu")
    assert (applied.compared[0].k, applied.compared[0].floor) == (y.k, y.floor)
    assert applied.tolerance_from == "calibration.json"


@pytest.mark.nightly
@pytest.mark.usefixtures("shared")
def test_a_derived_seed_is_one_way_unless_it_fails(tmp_path, ways):
    toml = TOML.replace('"bfloat16"', '"float32"')
    task = write(tmp_path / "sums", toml, REFERENCE % "")
    seed = task.folder / "cpp_inductor.py"
    seed.write_text(candidate(SEED_CODE, SEED_HOST))
    found = calibrate(task, "cpu", quiet)
    assert seed.name in found.ways, found.left_out
    seed.write_text(candidate(SEED_CODE.replace("at[i] = best", "at[i] = 0"), SEED_HOST))
    found = calibrate(task, "cpu", quiet)
    assert found.left_out[seed.name].startswith("INCORRECT_NUMERICAL in ")


@pytest.mark.nightly
def test_an_error_of_one_draw_in_thirty_is_seen_and_named(tmp_path, ways):
    """There the sum is small beside its terms, and so beside their roundings."""
    task = task_of(tmp_path)
    plain = calibrate(task, "cpu", quiet).results["y"]
    path = task.folder / "reference.py"
    text, end = path.read_text(), '    return {"x"'
    assert text.count(end) == 1
    rare = """
    if case.name == "wide" and torch.rand((), generator=generator) < 1 / 30:
        x[:, -1] = 16 - x[:, :-1].sum(-1)
"""
    path.write_text(text.replace(end, f"{rare}{end}"))
    found = calibrate(load_task(task.folder), "cpu", quiet).results["y"]
    assert plain.of_eps < 2
    assert found.of_eps > 10
    assert found.k > plain.k
    assert " in case wide errs " in found.why


def test_eager_that_is_off_is_no_reason_for_a_tolerance(tmp_path, ways):
    """Its own error would be its yardstick: of what is not near the reference, nothing is."""
    task = task_of(tmp_path, " * 9")
    with pytest.raises(TaskError, match=r"result y: .* the reference or eager is off"):
        calibrate(task, "cpu", quiet)


def test_a_calibration_has_bounds_and_is_of_one_version_of_the_task(tmp_path, ways):
    task = task_of(tmp_path)
    path = task.folder / "calibration.json"
    write_calibration(task.folder, Calibration({"cpu": calibrate(task, "cpu", quiet)}))
    data = json.loads(path.read_text())
    data["kinds"]["cpu"]["results"]["y"]["k"] = 1e6
    path.write_text(json.dumps(data))
    with pytest.raises(TaskError, match=r"y: k = 1e\+06 .*expected k up to 16"):
        load_task(task.folder)
    path.write_text("{}")
    with pytest.raises(TaskError, match="calibrate again, or remove the file"):
        load_task(task.folder)
    data["kinds"]["cpu"]["results"]["y"]["k"] = 2.0
    path.write_text(json.dumps(data))
    assert read_calibration(task.folder, task.digest) is not None
    toml = task.folder / "task.toml"
    toml.write_text(toml.read_text() + "\n# changed\n")
    with pytest.raises(TaskError, match=r"made for another task.toml or reference.py \(cpu\)"):
        load_task(task.folder)
    assert load_task(task.folder, calibrated=False).name == "tiny"


def test_kagents_own_tasks_stay_as_they_are(monkeypatch, capsys):
    refused = run_command(monkeypatch, capsys, "calibrate", "gelu")
    assert refused.code == 2
    assert "one of kagent's own tasks" in refused.err


def capped(x, weight, bias):
    return 20 * torch.tanh(torch.nn.functional.linear(x, weight, bias) / 20)


@pytest.mark.nightly
def test_a_task_that_was_made_with_sums_that_cancel_by_chance_is_calibrated(tmp_path, monkeypatch):
    """Rows of one sum each were cases: no tolerance allows for one that is 0 but for rounding."""
    all_ways = module._ways
    orders = {"eager", *ORDERS}
    monkeypatch.setattr(
        module, "_ways", lambda device: {n: w for n, w in all_ways(device).items() if n in orders}
    )
    torch.manual_seed(0)
    given = (torch.randn(128, 64), torch.rand(32, 64) / 4 - 0.125, torch.rand(32) / 4 - 0.125)
    draft = make_draft(next(find_rooms(make_operation(capped, given))))
    draft_files(draft, tmp_path / "capped")
    found = calibrate(load_task(tmp_path / "capped"), "cpu", lambda _: None)
    (y,) = found.results.values()
    assert draft.floor <= 64
    assert y.floor <= 64
