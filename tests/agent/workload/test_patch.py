"""Patches of a script: which functions are replaced, whether numbers stay, and what pays."""

import importlib.util
import io
import json
import subprocess
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from commands import run
from kagent.export.writing import files_of, write_library
from kagent.workload import patching
from kagent.workload.child import script_of
from kagent.workload.patch import Patch, Patched, PatchTrial, _whole, patch, rests_text
from kagent.workload.patch_file import Library, is_region, open_library, patch_text
from kagent.workload.patch_view import patch_view
from kagent.workload.sites import parse_site, sites_of_torch
from kagent.workload.steps import ScriptFailed
from kagent_sandbox.data.verdict import SpeedVerdict
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.timing.estimates import Interval
from library_package import ATTENTION, CROSS_ENTROPY, GELU, SOFTMAX, assemble, calls
from rich.console import Console
from synthetic_library import cpu_library
from torch import nn

NAMES = ("softmax", "gelu", "attention", "cross_entropy")
# A class of this process's own: pytest-xdist could not pass it on.
pytestmark = pytest.mark.filterwarnings("ignore:patched_ops")


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    """A patch of torch by a library with real operators, and the library."""
    folder = tmp_path_factory.mktemp("patched")
    package = assemble(folder / "patched_ops", "patched_ops", NAMES)
    package.add_kernel("softmax", SOFTMAX)
    package.add_kernel("gelu", GELU)
    package.add_kernel("attention", ATTENTION)
    package.add_kernel("cross_entropy", CROSS_ENTROPY)
    library = package.imported("patched_ops")
    for name in NAMES:
        setattr(library, name, getattr(sys.modules[f"patched_ops.operators.{name}"], name))
    text = patch_text(
        [Library("patched_ops", folder / "patched_ops/__init__.py", NAMES, known=True)],
        sites_of_torch(NAMES),
    )
    path = folder / "a_patch.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("a_patch", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module, library
    module.disable()


@pytest.fixture
def enabled(patched):
    module, library = patched
    module.enable()
    yield lambda task: len(calls(library, task))
    module.disable()


x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
q = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(0))
target = torch.tensor([0, 5, -100, 2])
TAKEN = {
    "F.softmax": ("softmax", lambda: F.softmax(x, -1)),
    "torch.softmax": ("softmax", lambda: torch.softmax(x, dim=1)),
    "Tensor.softmax": ("softmax", lambda: x.softmax(-1)),
    "nn.Softmax": ("softmax", lambda: nn.Softmax(dim=-1)(x)),
    "gelu": ("gelu", lambda: F.gelu(x, approximate="tanh")),
    "nn.GELU": ("gelu", lambda: nn.GELU(approximate="tanh")(x)),
    "attention": ("attention", lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)),
    "cross_entropy": ("cross_entropy", lambda: F.cross_entropy(x, target)),
}
LEFT = {
    "a softmax in another dtype": lambda: F.softmax(x, -1, dtype=torch.float64),
    "a softmax in another dtype, of a tensor": lambda: x.softmax(-1, dtype=torch.float64),
    "an exact gelu": lambda: F.gelu(x),
    "attention with a mask": lambda: F.scaled_dot_product_attention(
        q, q, q, attn_mask=torch.zeros(5, 5)
    ),
    "attention with a scale": lambda: F.scaled_dot_product_attention(q, q, q, scale=0.5),
    "smoothed labels": lambda: F.cross_entropy(x, target, label_smoothing=0.1),
    "a sum of losses": lambda: F.cross_entropy(x, target, reduction="sum"),
}


@pytest.mark.parametrize("name", TAKEN)
def test_functions_of_torch_become_the_librarys(patched, name):
    module, library = patched
    task, call = TAKEN[name]
    wanted, before = call(), len(calls(library, task))
    module.enable()
    assert torch.allclose(call(), wanted, atol=1e-6)
    module.disable()
    assert len(calls(library, task)) == before + 1
    assert torch.equal(call(), wanted)
    assert len(calls(library, task)) == before + 1


@pytest.mark.parametrize("name", LEFT)
def test_what_no_operator_computes_stays_torchs(patched, name):
    module, library = patched
    wanted = LEFT[name]()
    before = [len(calls(library, task)) for task in NAMES]
    module.enable()
    assert torch.equal(LEFT[name](), wanted)
    module.disable()
    assert [len(calls(library, task)) for task in NAMES] == before


def test_what_the_library_leaves_to_torch_does_not_come_back_to_it(enabled):
    half = x.to(torch.complex64)  # no kernel knows it
    assert F.softmax(half.real.double()[:, ::2].mT, 0).shape == (3, 4)
    with pytest.raises(RuntimeError):
        F.gelu(half, approximate="tanh")
    doubled = q.double().requires_grad_()  # no backward kernel: torch's own attention
    F.scaled_dot_product_attention(doubled, doubled, doubled).sum().backward()
    assert doubled.grad.isfinite().all()


def test_gradients_and_compiled_functions_go_through(enabled):
    a = x.clone().requires_grad_()
    F.softmax(a, -1).square().sum().backward()
    assert enabled("softmax") > 0
    b = x.clone().requires_grad_()
    torch.special.softmax(b, -1).square().sum().backward()
    assert torch.allclose(a.grad, b.grad, atol=1e-6)


def test_names_that_a_module_has_taken_are_replaced_too(patched):
    module, library = patched
    user = sys.modules["a_users_module"] = ModuleType("a_users_module")
    user.softmax = F.softmax
    before = len(calls(library, "softmax"))
    module.enable()
    user.softmax(x, -1)
    module.disable()
    del sys.modules["a_users_module"]
    assert len(calls(library, "softmax")) == before + 1
    assert user.softmax is F.softmax


def test_a_library_says_what_it_offers(tmp_path):
    library = cpu_library()
    write_library(library, files_of(library, cubins={}), tmp_path / "lib")
    opened = open_library(tmp_path / "lib")
    assert (opened.name, opened.operators) == ("made_kernels", ("softmax", "cross_entropy"))
    assert opened.file.is_file()
    with pytest.raises(UserError, match="no exported library: expected a folder"):
        open_library(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("softmax", "expected MODULE:NAME"),
        ("m:f(x = own(x)", "expected"),
        ("m:f(x) = other(x)", "names no function of the library: it has own"),
    ],
)
def test_a_replacement_that_is_none(text, words):
    with pytest.raises(UserError, match=words):
        parse_site(text, ["own"])


def test_a_replacement_in_words():
    site = parse_site("model:RMSNorm.forward(self, x) = own(x, self.weight)", ["own"])
    assert (site.name, site.operator) == ("model.RMSNorm.forward", "own")
    assert (site.parameters, site.call) == ("self, x", "own(x, self.weight)")


SCRIPT = """
import sys, time
import torch
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return torch.tanh(x)

class Plain(nn.Module):
    def forward(self, x):
        return torch.sigmoid(x)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), Slow(), Plain(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""
KERNELS = """
import torch
__all__ = ["fast_tanh", "wrong_sigmoid", "same_sigmoid"]
def fast_tanh(x):
    return 2 * torch.sigmoid(2 * x) - 1
def wrong_sigmoid(x):
    return torch.sigmoid(x) * 1.001
def same_sigmoid(x):
    return torch.sigmoid(x)
"""
TANH = "__main__:Slow.forward(self, x) = fast_tanh(x)"
WRONG = "__main__:Plain.forward(self, x) = wrong_sigmoid(x)"
NEVER = "torch.nn.functional:hardswish(x) = same_sigmoid(x)"


def here(observer, script, args, request):
    """Runs a script in this process: starting one takes seconds, and test_hotspots does."""
    given = {"script": str(script), "args": [str(a) for a in args], **request}
    try:
        return patching.observe(given, script_of(given))
    except ScriptFailed as e:
        raise UserError(f"{script}: {e}") from None


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("kagent.workload.patch.run_script", here)
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


def test_what_is_right_and_pays_is_kept(script, monkeypatch, capsys, tmp_path):
    notes = ["other programs used 1.5 cores"]
    monkeypatch.setattr(patching, "host_notes", lambda before, after: notes)
    to = tmp_path / "made_patch.py"
    words = ("patch", script, tmp_path / "kernels.py", "--replace", TANH, "--replace", WRONG)
    words = (*words, "--replace", NEVER, "--to", to, "--steps", 2, "--pairs", 6, "--json")
    ended = run(monkeypatch, capsys, *words, "--", "99")
    assert ended.code == 0, ended.err
    data = json.loads(ended.out)
    sites = {s["site"]: s for s in data["sites"]}
    assert sites["__main__.Slow.forward"]["kept"]
    assert sites["__main__.Slow.forward"]["calls"] == 1.0
    assert sites["__main__.Plain.forward"]["why"].startswith("wrong: ")
    assert sites["torch.nn.functional.hardswish"]["why"] == "the script never calls it"
    assert data["ratio"]["low"] > 1
    assert data["difference"]["share"] <= 1
    assert data["disturbed"] == notes
    text = to.read_text()
    assert "fast_tanh" in text
    assert "wrong_sigmoid" not in text


def test_what_disturbed_the_times_is_told():
    found = Patch("train.py", (), 3, 1, None, 5000.0, disturbed=("other programs used 1.5 cores",))
    console = Console(width=100, file=io.StringIO())
    console.print(patch_view(found))
    assert "disturbed: other programs used 1.5 cores" in console.file.getvalue()


def test_what_was_tried_with_the_rest_of_graphs_is_told():
    fast, slow = Interval(1.2, 1.1, 1.3), Interval(0.9, 0.8, 0.95)
    kept = PatchTrial(fast, SpeedVerdict.FASTER, 80.0, "operations", fast, kept=True)
    left = PatchTrial(slow, SpeedVerdict.SLOWER, 90.0, "inductor", slow, why="SLOWER")
    site = Patched("region norm", "norm", 2.0, trials=(kept, left), kept=True)
    captured = {"operations": Interval(1.0, 0.9, 1.1), "inductor": Interval(1.1, 1.0, 1.2)}
    found = Patch(
        "train.py", (site,), 3, 1, None, 100.0, 80.0, fast, rest="operations", captured=captured,
        notes=("Model was called with more than 8 kinds",), file="train_patch.py",
    )  # fmt: skip
    console = Console(width=140, file=io.StringIO())
    console.print(patch_view(found))
    text = console.file.getvalue()
    rows = [line.split() for line in text.splitlines() if "FASTER" in line or "SLOWER" in line]
    assert rows[0][:5] == ["region", "norm", "norm", "2", "operations"]
    assert (rows[0][-1], rows[1][0], rows[1][-1]) == ("kept", "inductor", "SLOWER")
    assert "without a kernel, run operation by operation: 1.0" in text
    assert "Model was called with more than 8 kinds" in text


def test_without_a_site_there_is_nothing_to_do(script, tmp_path):
    with pytest.raises(UserError, match="say what to replace with --replace"):
        patch(
            script, [tmp_path / "kernels.py"], [], replace=[], to=tmp_path / "p.py", kind="auto",
            steps=1, pairs=4, warmup=1,
        )  # fmt: skip


MODEL = """
import sys
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(F.relu(self.up(x) * 0.5 + 1.0))

torch.manual_seed(0)
model = Block()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
"""
REGION_KERNELS = """
#include <cstdint>
extern "C" void scaled(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float v = x[i] * 0.5f + 1.0f;
    y[i] = v > 0 ? v : 0;
  }
}
extern "C" void scaled_backward(const float* dy, const float* y, float* dx, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dx[i] = y[i] > 0 ? dy[i] * 0.5f : 0.0f;
}
"""
REGION_LIBRARY = """
import ctypes
import pathlib
import torch
_kernels = ctypes.CDLL(str(pathlib.Path(__file__).with_name("kernels.so")))
def _run(kernel, *tensors):
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors)
    result = torch.empty_like(tensors[-1])
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (*tensors, result)]
    kernel(*addresses, ctypes.c_int64(result.numel()))
    return result
def scaled(x0):
    return _run(_kernels.scaled, x0)
def scaled_backward(x0, x1):
    return _run(_kernels.scaled_backward, x0, x1)
def elsewhere(x0):
    raise AssertionError("nothing of the script is this region")
"""
SCALED = """
import torch
aten = torch.ops.aten
def eager(*, x0):
    mul = aten.mul.Tensor(x0, 0.5)
    add = aten.add.Tensor(mul, 1.0)
    return aten.relu.default(add)
"""
SCALED_BACKWARD = """
import torch
aten = torch.ops.aten
def eager(*, x0, x1):
    threshold = aten.threshold_backward.default(x0, x1, 0)
    return aten.mul.Tensor(threshold, 0.5)
"""
REGIONS = {"scaled": "scaled", "scaled_backward": "scaled_backward", "elsewhere": "other"}
BOTH = ["region scaled", "region scaled_backward"]


@pytest.fixture
def region_library(tmp_path, monkeypatch):
    """A library of regions with kernels in C++, and of one that the script does not have."""
    torch._dynamo.reset()
    inductor = torch._TorchCompileInductorWrapper  # a patch's process ends with it replaced
    monkeypatch.setattr(inductor, "__call__", inductor.__call__)
    package = tmp_path / "region_ops"
    (package / "operators").mkdir(parents=True)
    (package / "__init__.py").write_text(REGION_LIBRARY)
    (package / "operators/__init__.py").write_text("")
    references = {
        "scaled": SCALED,
        "scaled_backward": SCALED_BACKWARD,
        "other": SCALED.replace("0.5", "0.25"),
    }
    for task, text in references.items():
        (package / f"operators/_{task}_reference.py").write_text(text)
    (package / "kernels.cpp").write_text(REGION_KERNELS)
    built = ["g++", "-O2", "-shared", "-fPIC", "-o", package / "kernels.so"]
    subprocess.run([*built, package / "kernels.cpp"], check=True)
    library = Library("region_ops", package / "__init__.py", tuple(REGIONS), True, REGIONS)
    monkeypatch.setattr("kagent.workload.patch.open_library", lambda _: library)
    yield library
    for name in [n for n in sys.modules if "region_ops" in n]:
        del sys.modules[name]
    torch._dynamo.reset()


@pytest.fixture
def patch_regions(script, region_library, monkeypatch, tmp_path):
    """Patches a script whose steps run, and take times that are made up: a patch, its file and
    the configurations that were timed.
    """
    US = {"operations": (200.0, 100.0, 90.0), "inductor": (60.0, 50.0, 45.0)}
    timed, used = [], {}

    def times(session, configurations, pairs, warmup):
        timed.append(configurations)
        session.run(mode="times", configurations=configurations, pairs=pairs, warmup=warmup)
        us = [300.0 if c is None else used[c["rest"]][len(c["sites"])] for c in configurations]
        return [[each] * pairs for each in us], ()

    monkeypatch.setattr("kagent.workload.patch._times", times)

    def patched(text, us=None, **more):
        script.write_text(text)
        used.update(us or US)
        to = tmp_path / "region_patch.py"
        words = {"replace": [], "to": to, "kind": "optimizer", "steps": 2, "pairs": 4, "warmup": 1}
        return patch(script, [tmp_path], ["99"], **words, **more), to, timed

    return patched


@pytest.mark.nightly
def test_regions_of_both_directions_are_replaced(patch_regions):
    found, to, timed = patch_regions(MODEL)
    for site in found.sites[:2]:
        assert (site.calls, site.kept) == (1.0, True)
        assert site.difference is None or site.difference.share <= 1
        (inductor, operations) = site.trials
        assert (inductor.rest, inductor.ratio.value) == ("inductor", pytest.approx(1.2))
        assert (operations.rest, operations.ratio.value) == ("operations", pytest.approx(2.0))
    other = found.sites[2]
    assert other.why.startswith("no graph has these operations with these constants and sizes")
    assert "training of 24 operations (t.default, addmm.default, mul.Tensor" in other.why
    captured = [{"sites": [], "rest": "operations"}, {"sites": [], "rest": "inductor"}]
    replaced = [{**c, "sites": [name]} for c in captured for name in BOTH]
    together = {"sites": BOTH, "rest": "inductor"}
    assert timed == [[None, *captured, *replaced], [None, together]]  # None: as it is
    assert (found.rest, found.ratio.value) == ("inductor", pytest.approx(300 / 45))
    assert found.captured["inductor"].value == pytest.approx(5.0)
    assert "without a kernel, compiled by Inductor: 5.0" in to.read_text()
    module = patching._imported(to)
    block = nn.Sequential(nn.Linear(8, 16), Scaled())
    x = torch.randn(4, 8)
    wanted = block(x)
    module.enable(rest="operations")
    assert torch.allclose(block(x), wanted, atol=1e-6)
    assert module.GRAPHS
    module.disable()
    assert torch.equal(block(x), wanted)


@pytest.mark.nightly
@pytest.mark.parametrize(("both_us", "kept"), [(270.0, True), (310.0, False)])
def test_regions_are_held_against_the_script_together(patch_regions, both_us, kept):
    """To capture graphs costs 30 us, and each region saves 25."""
    us = {"operations": (330.0, 305.0, both_us)}
    found, to, timed = patch_regions(MODEL, us, rests=["operations"])
    assert [t.verdict for s in found.sites[:2] for t in s.trials] == ["FASTER", "FASTER"]
    assert [s.kept for s in found.sites[:2]] == [kept, kept]
    assert timed[1:] == [[None, {"sites": BOTH, "rest": "operations"}]]
    assert to.exists() == kept
    if kept:
        assert (found.ratio.value, found.after_us) == (pytest.approx(300 / 270), 270.0)
    else:
        assert found.ratio is None
        assert found.sites[0].why.startswith("together SLOWER beside the unpatched script, 0.9")


@pytest.mark.parametrize("names", [["region a"], ["region a", "region b"], ["torch.a"]])
@pytest.mark.parametrize(("deciding_us", "kept"), [(200.0, True), (310.0, False)])
def test_the_steps_gain_is_measured_after_all_is_decided(monkeypatch, names, deciding_us, kept):
    """What was chosen by a sample looks better in it than it is."""
    lucky = Interval(2.0, 1.9, 2.1)
    trial = PatchTrial(lucky, SpeedVerdict.FASTER, 150.0, "operations", lucky, kept=True)
    sites = [Patched(n, n, 1.0, trials=[trial], kept=True) for n in names]
    asked = []

    def times(session, configurations, pairs, warmup):
        asked.append((configurations, pairs))
        deciding = pairs - 4
        return [[300.0] * pairs, [deciding_us] * deciding + [270.0] * 4], ["a neighbour"]

    monkeypatch.setattr("kagent.workload.patch._times", times)
    regions = [n for n in names if n.startswith("region")]
    found = _whole(
        None, Patch("s", sites, 1, 1, None), sites, regions, "operations", 4, 1, lambda _: None
    )
    assert asked == [([None, {"sites": names, "rest": "operations"}], 8 if regions else 4)]
    if kept or not regions:
        assert (found.ratio.value, found.after_us) == (pytest.approx(300 / 270), 270.0)
        assert (found.before_us, found.disturbed) == (300.0, ["a neighbour"])
    else:
        assert found.ratio is None
        assert [p.kept for p in found.sites] == [False] * len(names)


@pytest.mark.nightly
def test_regions_of_a_script_that_compiles_itself(patch_regions):
    compiled = MODEL.replace("optimizer =", "step = torch.compile(model)\noptimizer =")
    found, _, timed = patch_regions(compiled.replace("    model(", "    step("))
    assert found.compiles
    assert [s.calls for s in found.sites] == [1.0, 1.0, 0.0]
    assert "training of 24 operations" in found.sites[2].why
    assert {c["rest"] for c in timed[0] if c} == {"inductor"}
    assert "the script's compiled graphs without a kernel" in rests_text(found)[0]


@pytest.mark.nightly
def test_what_inductor_cannot_compile_runs_by_operations(patch_regions, monkeypatch):
    def refused(*_args, **_more):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refused)
    found, to, timed = patch_regions(MODEL)
    assert {c["rest"] for c in timed[0] if c} == {"operations"}
    assert found.rest == "operations"
    assert "no compiler here" in found.notes[0]
    assert "REST = 'operations'" in to.read_text()
    with pytest.raises(UserError, match=r"cannot be compiled by Inductor: .*no compiler here"):
        patch_regions(MODEL, rests=["inductor"])
    found, *_ = patch_regions(MODEL, rests=["operations"])
    assert not found.notes


class Scaled(nn.Module):
    def forward(self, x):
        return F.relu(x * 0.5 + 1.0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (SCALED, True),
        ("def eager(*, x0):\n    return torch.tanh(x0)\n", False),
        ("def eager(*, x0):\n    return torch.tanh(aten.mul.Tensor(x0, 2.0))\n", False),
        ("def reference(*, x0):\n    return aten.mul.Tensor(x0, 2.0)\n", False),
    ],
)
def test_references_that_are_regions(text, wanted):
    assert is_region(text) is wanted
