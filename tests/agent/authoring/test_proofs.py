"""Operations that algebra shows to change nothing, and those of which it does not."""

from pathlib import Path

import pytest
import torch
from kagent.authoring.proofs import prove_idle
from kagent.authoring.task_toml import task_toml
from kagent_sandbox.data.task import load_task
from kagent_sandbox.judge.check.task_checker import check

BYTES = "torch.randint(0, 256, (n, n), dtype=torch.{}, generator=generator)"
UPPER = "torch.triu(torch.rand(n, n, generator=generator))"
MATRIX = "torch.rand(n, n, generator=generator)"


def write(folder, drawn, result, dtype, out="float32"):
    case = {"name": "case", "dtype": "float32", "n": 9}
    shape = {"shape": ["n", "n"]}
    data = {
        "name": "idle",
        "summary": "One expression",
        "entry": "run",
        "signature": "run(x)",
        "bytes": f"{getattr(torch, dtype).itemsize + getattr(torch, out).itemsize} * n * n",
        "written": f"{getattr(torch, out).itemsize} * n * n",
        "flops": "0",
        "dims": {"n": "size"},
        "arguments": [{"name": "x", **shape, "dtype": dtype}],
        "results": [{"name": "y", **shape, "dtype": out, "k": 4.0, "floor": 64.0}],
        "gpu": {"check": [case], "bench": [{**case, "name": "bench"}]},
        "cpu": {
            "check": [{**case, "name": "cpu"}, {**case, "name": "more", "n": 33}],
            "bench": [{**case, "name": "cpu_bench"}],
        },
    }
    folder.mkdir(exist_ok=True)
    wide = "x.double()" if dtype == "float32" else "x"
    (folder / "task.toml").write_text(task_toml(data))
    (folder / "reference.py").write_text(
        "import torch\nimport torch.nn.functional as F\n\n\n"
        "def inputs(case, generator, device):\n    n = case.dims['n']\n"
        f"    x = {drawn}\n    return {{'x': x}}\n\n\n"
        f"def compute(x):\n    return {result}\n\n\n"
        f"def reference(*, x):\n    return compute({wide})\n\n\n"
        "def eager(*, x):\n    return compute(x)\n\n\ndef experts():\n    return {}\n"
    )
    return data


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("dtype", "result", "operation"),
    [
        ("uint8", "(x >> 4) & 0xF", "(x >> 4) & 0xF"),
        ("uint8", "((x >> 4).to(torch.int32).T & 0xF)", "(x >> 4).to(torch.int32).T & 0xF"),
        ("uint8", "torch.bitwise_and((x & 7) >> 1, 3)", "torch.bitwise_and((x & 7) >> 1, 3)"),
        ("float32", "torch.triu(x @ x)", "torch.triu(x @ x)"),
        ("float32", "((x * 2) @ x).triu(-1)", "((x * 2) @ x).triu(-1)"),
        ("float32", "torch.tril((x @ x).T)", "torch.tril((x @ x).T)"),
        ("float32", "(x * 4 - 1).clamp(0, 1).mul(2).clamp(0, 1)", "(x * 4 - 1).clamp(0, 1)"),
        ("float32", "F.hardtanh(x * 4 - 1).div(0.5).clamp(-1, 1)", "F.hardtanh(x * 4 - 1)"),
        ("float32", "(torch.relu(x - 1) - 3).clamp_min(-2)", "torch.relu(x - 1)"),
        ("float32", "torch.maximum(torch.zeros_like(x) * 0.9, x)", "torch.zeros_like(x) * 0.9"),
        ("float32", "torch.maximum(x * 2, x.new_zeros(1).tanh())", "x.new_zeros(1).tanh()"),
        ("float32", "torch.maximum(x * 2, torch.zeros_like(x) * x)", "torch.zeros_like(x) * x"),
        ("float32", "torch.maximum(x * 2, x * torch.zeros_like(x))", "x * torch.zeros_like(x)"),
        ("int32", "(x + x.new_full(x.shape, 0)) * 3", "x + x.new_full(x.shape, 0)"),
        ("int32", "(torch.zeros_like(x) + x) * 3", "torch.zeros_like(x) + x"),
        ("int32", "(x - torch.zeros_like(x)) * 3", "x - torch.zeros_like(x)"),
        (
            "int32",
            "F.one_hot((x % 9).long(), 9).sum(-1).int() + x",
            "F.one_hot((x % 9).long(), 9)",
        ),
    ],
)
def test_algebra_shows_that_nothing_changes(tmp_path, dtype, result, operation):
    drawn = UPPER if dtype == "float32" else BYTES.format(dtype)
    out = "int32" if "int32" in result else dtype
    data = write(tmp_path, drawn, result, dtype, out)
    (proof,) = prove_idle(tmp_path)
    assert proof.operation.startswith(f"{operation} without its ")
    before = check(load_task(tmp_path), "cpu", torch.device("cpu"))
    assert any(proof.operation in h for h in before.holes)
    idle = [{"operation": proof.operation, "reason": proof.reason}]
    (tmp_path / "task.toml").write_text(task_toml({"without_effect": idle, **data}))
    found = check(load_task(tmp_path), "cpu", torch.device("cpu"))
    assert not any(proof.operation in h for h in found.holes)
    assert any(proof.operation in line for line in found.without_effect)


@pytest.mark.parametrize(
    ("drawn", "result", "dtype"),
    [
        (BYTES.format("int32"), "(x >> 4) & 0xF", "int32"),  # no byte, though all values are
        (BYTES.format("uint8"), "(x >> 4) & 0x7", "uint8"),
        (BYTES.format("uint8"), "(x >> 3) & 0xF", "uint8"),
        (BYTES.format("uint8"), "((x >> 4) + 1) & 0x1F", "uint8"),
        (BYTES.format("uint8"), "((x >> 4).add_(240)) & 0xF", "uint8"),
        (BYTES.format("uint8"), "x.repeat(1, 4).view(torch.int32) & 0xFF", "uint8"),
        (MATRIX, "x + torch.zeros_like(x) / (x - 1)", "float32"),
        (MATRIX, "x + torch.zeros_like(x) * -x", "float32"),  # -0
        (MATRIX, "x + (torch.zeros_like(x) + (x.shape[0] - 9))", "float32"),
        (MATRIX, "x + (x - x) * 0.9", "float32"),
        (MATRIX, "x if x.max().item() < 2 else x / 2", "float32"),
        (MATRIX, "1 / (torch.zeros_like(x) * -0.9) + x", "float32"),
        (MATRIX, "x + torch.zeros_like(x).add_(1) * 2", "float32"),
        (MATRIX, "x + torch.zeros_like(x).cos()", "float32"),
        (MATRIX, "torch.relu(x)", "float32"),  # no draw is below 0, and another could be
        (MATRIX, "torch.triu(x @ x)", "float32"),
        (UPPER, "torch.triu(x @ x.T)", "float32"),
        (UPPER, "torch.triu(x @ x, 1)", "float32"),
        (UPPER, "torch.triu((x + 1) @ x)", "float32"),
        (MATRIX, "(x - 1).clamp(0, 1).mul(0.5).clamp(0, 1)", "float32"),
        (MATRIX, "(x - 1).clamp(0, 1).mul(-2).clamp(0, 1)", "float32"),
        (MATRIX, "(x - 1).clamp(0, 1).square().clamp(0, 1)", "float32"),
        (MATRIX, "(x - 1).clamp(0, 1)", "float32"),
        (MATRIX, "F.hardtanh(x).mul(0.5).clamp(-1, 1)", "float32"),
        (MATRIX, "x.clamp(-9, 9).to(torch.int8).float().clamp(-1, 1)", "float32"),  # 200 is -56
        (MATRIX, "x.clamp(-9, 9).to(torch.float8_e4m3fn).float().clamp(-1, 1)", "float32"),
        (BYTES.format("int32"), "x.clamp(0, 9).mul(1 << 20).clamp(0, 99)", "int32"),
        (MATRIX, "(lambda y: y.mul(2).clamp(0, 1) + y)((x - 1).clamp(0, 1))", "float32"),
        # idle at n = 9 alone, where the limit is -31
        (MATRIX, "x.clamp(x.shape[0] - 40, 99).clamp(-31, 9)", "float32"),
        (
            MATRIX,
            "(lambda y: torch.cat([y[:1], y.mul(2).clamp(0, 1)[1:]]))((x - 1).clamp(0, 1))",
            "float32",
        ),
    ],
)
def test_what_values_alone_suggest_is_not_shown(tmp_path, drawn, result, dtype):
    write(tmp_path, drawn, result, dtype)
    assert prove_idle(tmp_path) == []


EARLIER = ["its exp", "+ 1 without its add", "mm (its self", "mm (its mat2"]


@pytest.mark.parametrize(
    ("result", "idle"),
    [
        ("torch.zeros_like(x) * {e} + x", ["add (its other", "mul (its self", *EARLIER]),
        ("torch.zeros_like(x) * {e} + x + {e}", ["add (its other", "mul (its self"]),
        ("(lambda e: torch.ones_like(e) * x)({e})", EARLIER),
        ("(lambda e: torch.ones_like(e) * x + e)({e})", []),
        ("torch.zeros_like(x).add_(1) * {e}", []),  # something is written
    ],
)
def test_what_only_zeros_or_shapes_are_made_of_is_idle(tmp_path, result, idle):
    write(tmp_path, MATRIX, result.format(e="(x @ x + 1).exp()"), "float32")
    found = [p.operation for p in prove_idle(tmp_path)]
    assert len(found) == len(idle)
    for words in idle:
        assert any(words in f for f in found)
    checked = check(load_task(tmp_path), "cpu", torch.device("cpu"))
    assert all(any(f in h for h in checked.holes) for f in found)


NORM = "torch.ops.aten.native_layer_norm(x, [{n}], x[0], x[1], 1e-5)"


@pytest.mark.parametrize(
    ("result", "idle"),
    [
        ("(lambda y, mean, rstd: (x - mean) * rstd)(*{norm})", True),
        ("(lambda y, mean, rstd: y * rstd)(*{norm})", False),
        ("{norm}[0]", False),
        ("{norm}[0].view(-1).view_as(x)", False),
    ],
)
def test_a_norm_whose_result_nobody_reads_is_idle(tmp_path, result, idle):
    norm = NORM.format(n="x.shape[1]")
    write(tmp_path, MATRIX, result.format(norm=norm), "float32")
    found = [p.operation.rpartition(" (")[2] for p in prove_idle(tmp_path)]
    assert found == (["its input instead)", "no weight)", "no bias)"] if idle else [])
    checked = check(load_task(tmp_path), "cpu", torch.device("cpu"))
    assert len([h for h in checked.holes if "native_layer_norm" in h]) == len(found)


def test_what_is_idle_in_one_of_several_places_with_the_same_words_is_not_shown(tmp_path):
    result = "sum(y & 0xF for y in (x >> 4, x))"
    write(tmp_path, BYTES.format("uint8"), result, "uint8", "uint8")
    assert prove_idle(tmp_path) == []


def test_the_folder_may_be_relative(tmp_path, monkeypatch):
    """`kagent new` without --to proved nothing."""
    write(tmp_path / "task", BYTES.format("uint8"), "(x >> 4) & 0xF", "uint8")
    monkeypatch.chdir(tmp_path)
    assert len(prove_idle(Path("task"))) == 1
