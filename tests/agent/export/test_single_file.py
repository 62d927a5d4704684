"""One kernel as one file: it stands alone, and runs its kernel where that was measured."""

import ast
import importlib.util
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from kagent.export import export as exporting
from kagent.export.measuring import LibraryTimes, TimedResult
from kagent.export.single_file import refuse_others, refuse_single_file, single_files
from kagent.export.views import files_json
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Comparison, SpeedVerdict
from kagent_sandbox.errors import UserError
from kagent_sandbox.replay.library_tests import Ran
from synthetic_library import SEEDS, device_of, kernel_of, operator_of
from torch.autograd import forward_ad

H100 = ("NVIDIA H100 80GB HBM3", "sm_90")


def operator_with(task, file, kind="cpu", **changes):
    kernel = replace(kernel_of(task, file, kind), **changes)
    device = device_of(task, kernel, kind, *(H100 if kind == "gpu" else ()))
    return operator_of(task, "Unused", [kernel], [device])


def imported(folder, operator, monkeypatch):
    """The file and its test as modules, and their texts."""
    texts = single_files(operator)
    monkeypatch.syspath_prepend(folder)
    found = []
    for name, text in texts.items():
        (folder / name).write_text(text)
        spec = importlib.util.spec_from_file_location(name[:-3], folder / name)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name[:-3], module)
        spec.loader.exec_module(module)
        found.append(module)
    return (*found, texts)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.sampled(one_in=2)
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("task", ["softmax", "cross_entropy"])
def test_a_cpp_kernel_is_compiled_and_used_where_it_was_measured(task, tmp_path, monkeypatch):
    module, test, texts = imported(tmp_path, operator_with(task, "cpp_rows.py"), monkeypatch)
    for text in texts.values():
        roots = {
            name.partition(".")[0]
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            )
        }
        assert roots <= {*sys.stdlib_module_names, "torch", "pytest", task}
        assert text.startswith("# SPDX-License-Identifier: Apache-2.0\n")
    for case in test.CASES:
        test.test_the_kernel_agrees_with_float64(case)
    calls = []
    launch = getattr(module, f"launch_{task}")
    monkeypatch.setattr(module, f"launch_{task}", lambda *a: calls.append(a) or launch(*a))
    (_, dims, best), *_ = module.MEASURED
    assert best
    measured = test.drawn(replace(test.smallest(), dims=dims))
    test.check(getattr(module, task)(**measured), measured)
    assert len(calls) == 1
    small = test.drawn(test.smallest())
    test.check(getattr(module, task)(**small), small)
    wide = {
        n: v.double() if torch.is_floating_point(torch.as_tensor(v)) else v
        for n, v in measured.items()
    }
    getattr(module, task)(**wide)
    assert len(calls) == 1
    with monkeypatch.context() as patch:
        test.test_the_kernel_is_used_at_measured_shapes_and_not_below(patch)
        test.test_what_only_torch_can_do_goes_to_torch(patch)


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_torch_is_called_with_one_warning(tmp_path, monkeypatch):
    module, test, _ = imported(tmp_path, operator_with("softmax", "cpp_rows.py"), monkeypatch)
    monkeypatch.setenv("PATH", "/nonexistent")
    arguments = test.drawn(replace(test.smallest(), dims=module.MEASURED[0][1]))
    with pytest.warns(UserWarning, match="softmax calls torch from now on: FileNotFound") as found:
        results = [module.softmax(**arguments) for _ in range(2)]
    for result in results:
        test.check(result, arguments)
    assert len(found) == 1
    assert found[0].filename == __file__


def test_it_is_an_operator_of_torch(tmp_path, monkeypatch):
    operator = operator_with("softmax", "cpp_rows.py")
    module, test, _ = imported(tmp_path, operator, monkeypatch)
    monkeypatch.setattr(module, "uses_kernel", lambda *_: False)
    monkeypatch.setattr(module, "LEAST", 0)
    arguments = test.drawn(test.smallest())
    quick = ("test_schema", "test_faketensor")
    torch.library.opcheck(module._operator, tuple(arguments.values()), test_utils=quick)
    refuses = pytest.raises(NotImplementedError, match="no forward-mode derivative of softmax")
    (x,) = arguments.values()
    with forward_ad.dual_level(), refuses:
        module._operator(forward_ad.make_dual(x, x))
    with refuses:
        torch.func.jvp(module._operator, (x,), (x,))
    dual = torch.func.jvp(module.softmax, (x,), (x,))[1]
    torch.testing.assert_close(dual, torch.func.jvp(lambda a: a.softmax(-1), (x,), (x,))[1])
    symbols = torch.fx.symbolic_trace(module.softmax)
    assert any(n.target is torch.softmax for n in symbols.graph.nodes)
    traced = torch.fx.experimental.proxy_tensor.make_fx(module.softmax)(arguments["x"])
    name = f"{operator.kernels[0].id}.softmax"
    assert any(name in str(n.target) for n in traced.graph.nodes)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_while_compiling_calls_that_the_kernel_is_not_for_are_torchs(rank, tmp_path, monkeypatch):
    module, test, _ = imported(tmp_path, operator_with("softmax", "cpp_rows.py"), monkeypatch)
    monkeypatch.setattr(module, "uses_kernel", lambda *_: False)
    monkeypatch.setattr(module, "LEAST", 0)
    (x,) = test.drawn(test.smallest()).values()
    x = {1: x[0], 2: x, 3: x[None]}[rank]
    torch.compiler.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        for call in (module.softmax, torch.compile(module.softmax, fullgraph=True)):
            torch.testing.assert_close(call(x), module.eager(x=x))


class Recorder:
    """Stands for a Triton kernel."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((grid, args, options))


def test_a_triton_kernel_is_launched_as_it_was_measured(tmp_path, monkeypatch):
    config = {"ELEMENTS_PER_THREAD": 32}
    operator = operator_with("softmax", "triton_rows.py", "gpu", configs=(config,))
    module, test, texts = imported(tmp_path, operator, monkeypatch)
    assert "kagent_sandbox" not in texts["softmax.py"]
    assert "@triton.jit" in texts["softmax.py"]
    assert "cpp_kernel" not in texts["softmax.py"]
    assert module.ELEMENTS_PER_THREAD == 32
    assert module.CAPABILITY == (9, 0)
    monkeypatch.setattr(module, "softmax_rows", Recorder())
    x = torch.randn(70, 4096)
    y = module.launch_softmax(x)
    ((grid, args, options),) = module.softmax_rows.launches
    assert grid == (70,)
    assert args[0] is x
    assert args[1] is y
    assert options == {"WORD": 4, "BLOCK": 4096, "num_warps": 4}
    torch.testing.assert_close(module.softmax(x), torch.softmax(x, -1))  # a CPU's tensors: torch
    assert len(module.softmax_rows.launches) == 1
    with monkeypatch.context() as patch:
        test.test_the_kernel_is_used_at_measured_shapes_and_not_below(patch)


def test_a_configuration_of_an_autotuned_kernel_is_set(tmp_path):
    tuned = (
        '@triton.autotune([triton.Config({"BLOCK_K": 8})], key=[])\n@triton.jit\ndef tuned(): ...\n'
    )
    source = (SEEDS / "softmax" / "triton_rows.py").read_text()
    operator = operator_with("softmax", "triton_rows.py", "gpu")
    values = {"tuned": {"BLOCK_K": 8, "num_warps": 2, "num_stages": 3}}
    kernel = replace(operator.kernels[0], source=f"{source}\n\n{tuned}", configs=(values,))
    text = single_files(replace(operator, kernels=(kernel,)))["softmax.py"]
    config = "triton.Config({'BLOCK_K': 8}, num_warps=2, num_stages=3)"
    assert f"_tuner.configs = [{config}]" in text


@pytest.mark.parametrize(
    ("task", "file", "kind", "added", "said"),
    [
        ("softmax", "cuda_cluster.py", "gpu", "", "a CUDA kernel needs NVRTC"),
        ("softmax", "cpp_rows.py", "cpu", "\nlaunch_softmax = 1\n", "launch_softmax is taken"),
        ("softmax", "cpp_rows.py", "cpu", "\ndef f(softmax): ...\n", "softmax is taken"),
        ("softmax", "triton_rows.py", "gpu", "\nfrom kagent_sandbox.lang import tensor_map\n",
         "tensor_map"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_single_file_is_refused_before_it_is_measured(
    task, file, kind, added, said
):
    operator = operator_with(task, file, kind)
    (kernel,) = operator.kernels
    with pytest.raises(UserError, match=said):
        refuse_single_file(operator, kernel.id, kernel.source + added)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch\n", "import torch; GUARD = 1\n"),  # a statement that would be lost
        ('"""Softmax', '"doc"; GUARD = 1\n"""Softmax'),
        ("def softmax(", "def  softmax("),
        ("def softmax(", "def \\\n softmax("),
        ("def softmax(", "def \uff53oftmax("),  # the same name to Python
        ("import torch\n", "import torch\nglobals()['MEASURED'] = []\n"),
        ("import torch\n", "import torch\nexec('CHECKED = []')\n"),
    ],
)
def test_a_single_file_is_what_was_judged_or_refused(before, after):
    operator = operator_with("softmax", "cpp_rows.py")
    (kernel,) = operator.kernels
    assert before in kernel.source
    changed = kernel.source.replace(before, after, 1)
    with pytest.raises(UserError, match=r"cannot be taken apart|can change names"):
        refuse_single_file(operator, kernel.id, changed)


@pytest.mark.parametrize(
    "line",
    [
        "def again():\n    global MEASURED\n    MEASURED = []\n",
        "if True:\n    def uses_kernel(*_): return True\n",
        "if True:\n    import math as eager\n",
        "match 0:\n    case CHECKED: pass\n",
    ],
)
def test_all_names_of_a_module_are_known(line):
    operator = operator_with("softmax", "cpp_rows.py")
    (kernel,) = operator.kernels
    changed = replace(kernel, source=f"{kernel.source}\n\n{line}")
    with pytest.raises(UserError, match="two meanings"):
        single_files(replace(operator, kernels=(changed,)))


def test_names_with_two_meanings_and_several_configurations_are_refused():
    operator = operator_with("softmax", "cpp_rows.py")
    (kernel,), (device,) = operator.kernels, operator.devices
    named = replace(kernel, source=kernel.source + "\nMEASURED = 1\n")
    with pytest.raises(UserError, match="MEASURED would have two meanings"):
        single_files(replace(operator, kernels=(named,)))
    first, second, *rest = device.points
    second = replace(second, config={kernel.id: 1})
    swept = replace(kernel, configs=({"LANES": 8}, {"LANES": 16}))
    points = (first, second, *rest)
    both = replace(operator, kernels=(swept,), devices=(replace(device, points=points),))
    with pytest.raises(UserError, match="2 configurations of its tunables"):
        single_files(both)


def test_a_single_file_says_that_its_kernel_is_not_faster_everywhere():
    operator = operator_with("softmax", "cpp_rows.py")
    (device,) = operator.devices
    assert "where it was measured to be faster" in single_files(operator)["softmax.py"]
    tied = [replace(p, verdicts={p.best: SpeedVerdict.TIE}) for p in device.points]
    asked_for = replace(operator, devices=(replace(device, points=tuple(tied)),))
    text = single_files(asked_for)["softmax.py"]
    assert "`softmax` calls the kernel near the shapes below, also where it is not FASTER" in text
    assert "where it was measured to be faster" not in text


def test_files_that_are_there_stay(tmp_path):
    (tmp_path / "softmax.py").write_text("mine")
    with pytest.raises(UserError, match=r"has softmax\.py: --force overwrites"):
        refuse_others(tmp_path, ["softmax.py", "test_softmax.py"], force=False)
    refuse_others(tmp_path, ["softmax.py", "test_softmax.py"], force=True)


def winner_of(operator, folder):
    """All that an export asks of a winner."""
    (kernel,) = operator.kernels
    task = load_task(SEEDS / operator.task)
    return SimpleNamespace(
        id=kernel.id, task=task, source=kernel.source, language=kernel.written_in, configs=1,
        choice={}, origin=kernel.origin, is_of_todays_task=False, folder=folder,
        manifest=SimpleNamespace(kind=kernel.written_in.kind), candidate=SimpleNamespace(id=7),
    )  # fmt: skip


def test_files_are_written_once_their_own_tests_pass(tmp_path, monkeypatch):
    operator = operator_with("softmax", "cpp_rows.py")
    (kernel,), (device,) = operator.kernels, operator.devices
    winner = winner_of(operator, tmp_path / "run")
    faster = Comparison("torch", 1.3, 1.2, 1.4, 1.0, {})
    found = TimedResult(kernel.id, "", kernel.configs, kernel.regions, faster)
    compiled = {kernel.id: kernel.compiled}
    times = LibraryTimes(device, "cpu", {kernel.id: found}, compiled, {})
    tested, said, to = [], [], tmp_path / "out"
    failing = Ran(1, ("test_softmax.py::test_x",), "the log")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    host = SimpleNamespace(
        measure=lambda wanted, _: [times for _ in wanted],
        run_tests=lambda *a, **k: tested.append((a, k)) or failing,
    )
    with pytest.raises(UserError, match=r"nothing was written: .* test_softmax\.py::test_x failed"):
        exporting.export_files([winner], to, host, said.append)
    assert not to.exists()
    assert "run: of an earlier version of softmax; judged anew by today's" in said
    host.run_tests = lambda *a, **k: tested.append((a, k)) or Ran(3, (), "")
    done = exporting.export_files([winner], to, host, said.append)
    assert done.files == ("softmax.py", "test_softmax.py")
    assert sorted(p.name for p in to.iterdir()) == ["softmax.py", "test_softmax.py"]
    ((_, files), options) = tested[-1]
    assert {n: (to / n).read_bytes() for n in done.files} == files
    assert options == {"gpu": False, "path": ""}
    assert "cpu_1536x1024" in str(files_json(done))
    with pytest.raises(UserError, match="one kernel of a task"):
        exporting.export_files([winner, winner], tmp_path / "two", host, said.append)
    with pytest.raises(UserError, match="--force overwrites"):
        exporting.export_files([winner], to, host, said.append)
