import math

import pytest
import torch
from commands import run
from flashinfer_definitions import norm, paged, tensor, variable, workload, write
from kagent.authoring.importers.flashinfer.cases import CHECK, at_point
from kagent.authoring.importers.flashinfer.exchange import find_definitions, read_definition
from kagent.authoring.importers.flashinfer.inputs import understand
from kagent.authoring.importers.flashinfer.task import import_definition
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import TaskError, UserError
from kagent_sandbox.judge.check.task_checker import check

AXES = norm()["axes"]


def imported(folder, definition, *workloads):
    path = write(folder, definition, *workloads)
    found = import_definition(path, path.with_suffix(".jsonl") if workloads else None, folder)
    return load_task(found.folder), found


def drawn(task, case, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return task.reference().inputs(case, generator, torch.device("cpu"))


def test_a_definition_becomes_a_task_that_passes_its_check(tmp_path):
    task, _ = imported(tmp_path, paged())
    assert task.name == "paged_d8_ps4"
    assert task.signature.startswith("run(q: bfloat16[batch_size, head_dim=8], cache: bfloat16[")
    assert set(task.dims) == {"batch_size", "num_pages", "num_kv_indices"}
    assert task.arguments[2].shape == ("batch_size + 1",)
    assert task.arguments[5].value == pytest.approx(1 / math.sqrt(8))
    assert task.results[1].dtype == "float32"
    found = check(task, "cpu", torch.device("cpu"))
    assert not found.holes
    assert found.wrong > 5


def test_offsets_pages_and_lengths_are_valid_in_every_case(tmp_path):
    task, _ = imported(tmp_path, paged())
    for case in (*task.gpu.check, *task.cpu.check, *task.cpu.bench):
        t = drawn(task, case)
        pages = t["kv_indptr"].diff()
        assert t["kv_indptr"][0] == 0
        assert t["kv_indptr"][-1] == len(t["kv_indices"])
        assert len(t["kv_indices"].unique()) == len(t["kv_indices"])
        assert int(t["kv_indices"].max()) < len(t["cache"])
        assert bool(((t["kv_last_page_len"] >= 1) | (pages == 0)).all())
        assert bool((t["kv_last_page_len"] <= 4).all())
        assert bool((pages == 0).any()) == (case.inputs == "empty")


def test_tensors_of_one_element_are_drawn(tmp_path):
    definition = norm()
    for name in ("weight", "q_scale"):
        definition["inputs"][name] = {"shape": [], "dtype": "float32"}
    definition["reference"] = "def run(x, weight, eps, q_scale):\n    return x * weight * q_scale\n"
    task, _ = imported(tmp_path, definition)
    t = drawn(task, task.cpu.check[0])
    assert t["weight"].shape == t["q_scale"].shape == ()
    assert 0.02 <= float(t["q_scale"]) <= 0.1


@pytest.mark.parametrize(("axis", "size"), [("batch_size", 5), ("len_indptr", 6)])
def test_lengths_of_last_pages_fit_offsets_of_any_length(tmp_path, axis, size):
    definition = paged(constraints=["num_kv_indices == kv_indptr[-1].item()"])
    definition["inputs"] |= {
        "q": tensor("total", "head_dim"),
        "kv_last_page_len": tensor(axis, dtype="int32"),
    }
    definition["axes"] |= variable("total")
    definition["outputs"] = {"out": tensor("total", "head_dim")}
    inputs = understand(read_definition(write(tmp_path, definition)), [])
    dims = at_point(inputs, CHECK["empty"])
    last = inputs.tensors["kv_last_page_len"]
    assert [inputs.value(s, dims) for s in inputs.shape(last)] == [size]
    offsets = inputs.tensors["kv_indptr"]
    assert [inputs.value(s, dims) for s in inputs.shape(offsets)] == [6]


def test_queries_never_outnumber_the_keys_that_they_see(tmp_path):
    axes = variable("total_q", "total_kv", "len_indptr")
    definition = paged(
        name="ragged",
        axes={**axes, "d": {"type": "const", "value": 8}},
        constraints=["total_q == qo_indptr[-1].item()", "total_kv == kv_indptr[-1].item()"],
        inputs={
            "q": tensor("total_q", "d"),
            "k": tensor("total_kv", "d"),
            "qo_indptr": tensor("len_indptr", dtype="int32"),
            "kv_indptr": tensor("len_indptr", dtype="int32"),
        },
        outputs={"o": tensor("total_q", "d")},
        reference="def run(q, k, qo_indptr, kv_indptr):\n    return q * k.sum()\n",
    )
    fits = {"len_indptr": 3, "total_q": 4, "total_kv": 9}
    task, found = imported(tmp_path, definition, workload(fits), workload({**fits, "total_kv": 3}))
    assert (found.workloads, found.used) == (2, 1)
    assert [c.dims for c in task.gpu.bench] == [{"total_q": 4, "total_kv": 9, "len_indptr": 3}]
    for seed in range(20):
        t = drawn(task, task.gpu.check[1], seed)
        assert bool((t["kv_indptr"].diff() >= t["qo_indptr"].diff()).all())


def test_workloads_give_sizes_and_numbers(tmp_path):
    loads = [
        workload({"rows": n}, eps={"type": "scalar", "value": 1e-5}, x={"type": "random"})
        for n in (4, 1000, 16, 100, 8, 2, 1)
    ]
    task, found = imported(tmp_path, norm(), *loads)
    assert [c.dims["rows"] for c in task.gpu.bench] == [1, 4, 8, 16, 1000]
    assert found.used == 7
    assert task.arguments[2].value == 1e-5
    assert task.gpu.hidden_bench[0].dims["rows"] == (2, 100)
    spec = build_case(task, task.cpu.check[0])
    assert spec.arguments[0].shape == (1, 32)


def test_numbers_that_differ_between_workloads_are_a_dimension(tmp_path):
    inputs = {**norm()["inputs"], "first": {"shape": None, "dtype": "int32"}}
    code = norm()["reference"].replace("eps):", "eps, first):")
    loads = [workload({"rows": 2}, first={"type": "scalar", "value": v}) for v in (0, 32)]
    task, _ = imported(tmp_path, norm(inputs=inputs, reference=code), *loads)
    assert [c.dims["first"] for c in task.gpu.bench] == [0, 32]


def test_products_are_counted_from_the_reference(tmp_path):
    code = "import torch\n\n\ndef run(x, weight, eps):\n    return x @ weight.T\n"
    inputs = {**norm()["inputs"], "weight": tensor("hidden", "hidden")}
    task, _ = imported(tmp_path, norm(reference=code, inputs=inputs))
    assert (task.flops, task.matrix) == ("2048 * rows", True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reference": "def run(x): return torch.multinomial(x, 1)"}, "random numbers"),
        ({"reference": "def go(x): pass"}, "no function named run"),
        ({"reference": "def run(x, weight, eps):\n    return x +"}, "reference: line 2"),
        ({"reference": "def run(x, weight, eps):\n    return x.add_(1)"}, "writes to its input x"),
        ({"reference": "def run(x, weight, eps):\n    return x.nope"}, "fails on drawn inputs: A"),
        ({"inputs": {"x": tensor("rows", dtype="int32")}}, "which whole numbers are valid"),
        ({"inputs": {"x": tensor("rows", dtype="float4_e2m1")}}, "no dtype 'float4_e2m1'"),
        ({"inputs": {"x_indptr": tensor("rows", dtype="int32")}}, "which axis they divide"),
        ({"axes": {**AXES, "hidden": {"type": "const", "value": 1 << 34}}}, "no sizes fit"),
        ({"outputs": {"y": {"shape": None, "dtype": "float32"}}}, "outputs.y is a number"),
    ],
)  # fmt: skip
def test_what_no_task_can_be_is_refused_in_one_line(tmp_path, changes, says):
    with pytest.raises(TaskError, match=says) as found:
        imported(tmp_path, norm(**changes))
    assert "\n" not in str(found.value)


def test_optional_inputs_with_a_default_are_left_out(tmp_path):
    inputs = {**norm()["inputs"], "buffer": tensor("rows", optional=True)}
    code = norm()["reference"].replace("eps):", "eps, buffer=None):")
    found = understand(read_definition(write(tmp_path, norm(inputs=inputs, reference=code))), [])
    assert found.left_out == ["buffer"]


def test_definitions_are_found_with_their_workloads(tmp_path):
    path = write(tmp_path, norm(), workload({"rows": 1}))
    write(tmp_path, paged())
    (tmp_path / "other.json").write_text("{}")
    found = dict(find_definitions([tmp_path]))
    assert found == {path: path.with_suffix(".jsonl"), tmp_path / "paged_d8_ps4.json": None}
    with pytest.raises(UserError, match="no definition there"):
        find_definitions([path.with_suffix(".jsonl")])
    with pytest.raises(UserError, match="workloads of no definition"):
        find_definitions([tmp_path / "paged_d8_ps4.json", path, write_lost(tmp_path)])


def write_lost(folder):
    lost = folder / "lost.jsonl"
    lost.write_text("")
    return lost


def test_the_command_names_what_it_imported_and_what_not(tmp_path, monkeypatch, capsys):
    write(tmp_path, norm())
    write(tmp_path, norm(name="sampling", reference="def run(x, weight, eps):\n    x.normal_()"))
    done = run(monkeypatch, capsys, "import", "flashinfer", tmp_path, "--to", tmp_path / "tasks")
    assert done.code == 2
    assert "tasks/norm_h32  (usual sizes: no workloads)" in done.out
    assert "not imported: sampling: its reference draws random numbers" in done.err
    again = ("import", "flashinfer", tmp_path / "Norm-h32.json", "--to", tmp_path / "tasks")
    done = run(monkeypatch, capsys, *again)
    assert "norm_h32: exists: remove it, or overwrite it with --force" in done.err
