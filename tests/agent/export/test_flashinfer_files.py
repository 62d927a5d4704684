"""FlashInfer-Bench's files: what is in them, that they run, and that the package itself takes them.

Its dependencies are too many for a development environment: KAGENT_TEST_FLASHINFER names a Python
that has it.
"""

import ast
import json
import os
import subprocess
from dataclasses import replace

import pytest
import torch
from kagent.authoring.importers.flashinfer.exchange import Definition
from kagent.export.flashinfer import flashinfer_files
from kagent_sandbox.data.case import Case
from synthetic_library import cpu_library, gpu_library, in_place_library

PYTHON = os.environ.get("KAGENT_TEST_FLASHINFER")


def of_kind(files, folder):
    found = {p: t for p, t in files.items() if p.startswith(f"flashinfer_bench/{folder}/")}
    return [json.loads(line) for p, t in found.items() for line in lines(p, t)]


def lines(path, text):
    return text.splitlines() if path.endswith(".jsonl") else [text]


def test_a_definition_has_the_task_in_one_dtype():
    (softmax, entropy) = of_kind(flashinfer_files(cpu_library()), "definitions")
    assert softmax["name"] == "softmax_float32"
    assert softmax["axes"]["M"] == {"type": "var", "description": "rows"}
    assert softmax["inputs"] == {"x": {"shape": ["M", "N"], "dtype": "float32"}}
    assert entropy["inputs"]["target"] == {"shape": ["M"], "dtype": "int64"}
    assert entropy["inputs"]["ignore_index"] == {"shape": None, "dtype": "int64"}
    assert entropy["outputs"]["loss"] == {"shape": [], "dtype": "float32"}


def test_a_definition_s_reference_runs_by_itself():
    softmax, entropy = of_kind(flashinfer_files(cpu_library()), "definitions")
    x = torch.randn(5, 7)
    names = {}
    exec(softmax["reference"], names)
    torch.testing.assert_close(names["run"](x), torch.softmax(x, -1))
    exec(entropy["reference"], names)
    loss, grad = names["run"](x, torch.arange(5), -100)
    assert (loss.dtype, grad.dtype) == (torch.float32, torch.float32)


def test_traces_have_the_record_s_figures_and_none_that_it_lacks():
    library = cpu_library()
    files = flashinfer_files(library)
    trace = of_kind(files, "traces")[0]
    evaluation = trace["evaluation"]
    assert evaluation["performance"]["latency_ms"] == pytest.approx(0.1)
    assert evaluation["performance"]["reference_latency_ms"] == pytest.approx(0.13)
    assert evaluation["performance"]["speedup_factor"] == pytest.approx(1.3)
    assert evaluation["correctness"]["max_relative_error"] == 14 * 2.0**-23  # of 14 check cases
    assert "max_absolute_error" not in evaluation["correctness"]
    assert not any('"NaN"' in text for text in files.values())
    assert evaluation["environment"]["libs"]["torch"] == "2.13.0"
    loads = {w["workload"]["uuid"] for w in of_kind(files, "workloads")}
    solutions = {s["name"] for s in of_kind(files, "solutions")}
    for found in of_kind(files, "traces"):
        assert found["workload"]["uuid"] in loads
        assert found["solution"] in solutions


def test_flags_are_scalars_of_a_workload():
    (first, *_) = of_kind(flashinfer_files(gpu_library()), "workloads")
    assert first["workload"]["inputs"]["causal"] == {"type": "scalar", "value": True}
    assert set(first["workload"]["axes"]) == {"B", "H", "Hkv", "S", "D"}


def test_sizes_that_are_numbers_or_formulas_become_axes():
    library = cpu_library()
    softmax = library.operators[0]
    text = softmax.task_toml.replace(
        'name = "y"\nshape = ["M", "N"]', 'name = "y"\nshape = ["2 * N", 3]'
    )
    odd = replace(library, operators=(replace(softmax, task_toml=text),))
    files = flashinfer_files(odd)
    (definition,) = of_kind(files, "definitions")
    assert definition["outputs"]["y"]["shape"] == ["size_2_N", "size_3"]
    assert definition["axes"]["size_3"] == {"type": "const", "value": 3}
    assert definition["constraints"] == ["size_2_N == 2 * N"]
    assert of_kind(files, "workloads")[0]["workload"]["axes"] == {
        "M": 1536,
        "N": 1024,
        "size_2_N": 2048,
    }


WRITTEN = ("param", "exp_avg", "exp_avg_sq")


def test_new_values_of_arguments_that_are_written_in_place_are_outputs():
    (made,) = of_kind(flashinfer_files(in_place_library()), "definitions")
    definition = Definition.model_validate(made)
    assert list(definition.outputs) == ["new_param", "new_exp_avg", "new_exp_avg_sq"]
    for name in WRITTEN:
        output, given = definition.outputs[f"new_{name}"], definition.inputs[name]
        assert (output.shape, output.dtype) == (given.shape, given.dtype)
    names = {}
    exec(definition.reference, names)
    case = Case(name="c", dtype="float32", M=3, N=8)
    given = names["inputs"](case, torch.Generator().manual_seed(0), torch.device("cpu"))
    before = {n: t.clone() for n, t in given.items()}
    numbers = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
    found = names["run"](**given, **numbers)
    assert all(torch.equal(t, before[n]) for n, t in given.items())
    names["eager"](**given, **numbers)
    torch.testing.assert_close(found, tuple(given[n] for n in WRITTEN))


def test_an_argument_s_new_value_is_named_like_no_input():
    library = in_place_library()
    (operator,) = library.operators
    text = operator.task_toml.replace('"grad"', '"new_param"')
    taken = replace(library, operators=(replace(operator, task_toml=text),))
    (definition,) = of_kind(flashinfer_files(taken), "definitions")
    assert "new_param" in definition["inputs"]
    assert next(iter(definition["outputs"])) == "new_new_param"


RESULT = """
[[results]]
name = "norm"
shape = ["M"]
k = 2.0
floor = 2.0
"""


@pytest.mark.parametrize("returned", [(), (11,), (11, 12)])
def test_a_solution_returns_the_arguments_that_it_has_written(returned):
    library = in_place_library()
    (operator,) = library.operators
    more = "".join(RESULT.replace("norm", f"norm_{i}") for i in returned)
    text = operator.task_toml + more
    made = replace(library, operators=(replace(operator, task_toml=text),))
    (solution,) = of_kind(flashinfer_files(made), "solutions")
    main = solution["sources"][0]["content"]
    tree = ast.parse(main)
    (run,) = (n for n in tree.body if isinstance(n, ast.FunctionDef))
    calls = []

    class Kernel:
        @staticmethod
        def adamw(*given):
            calls.append(given)
            return returned[0] if len(returned) == 1 else returned or None

    names = {"kernel": Kernel}
    exec(ast.unparse(run), names)
    assert names["run"](*range(10)) == (*returned, 0, 2, 3)
    assert calls == [tuple(range(10))]


def test_solutions_stand_alone_or_need_the_library():
    cpp, *_ = of_kind(flashinfer_files(cpu_library()), "solutions")
    assert cpp["spec"]["dependencies"] == ["made_kernels"]
    assert cpp["spec"]["language"] == "python"
    triton, cuda = of_kind(flashinfer_files(gpu_library()), "solutions")
    assert (triton["spec"]["language"], triton["spec"]["dependencies"]) == ("triton", [])
    assert cuda["spec"]["dependencies"] == ["made_gpu_kernels"]
    for solution in (cpp, triton, cuda):
        for source in solution["sources"]:
            ast.parse(source["content"])
            assert "kagent_sandbox" not in source["content"]


@pytest.mark.skipif(
    not PYTHON, reason="KAGENT_TEST_FLASHINFER names no Python with flashinfer-bench"
)
@pytest.mark.parametrize("made", [cpu_library, gpu_library, in_place_library])
def test_the_package_reads_it_as_a_trace_set(made, tmp_path):
    for path, text in flashinfer_files(made()).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    code = """
import sys
from flashinfer_bench.data import TraceSet
found = TraceSet.from_path(sys.argv[1])
assert len(found.definitions) == int(sys.argv[2]), found.definitions
for name, definition in found.definitions.items():
    assert found.solutions[name]
    for trace in found.traces[name] + found.workloads[name]:
        assert set(trace.workload.axes) == set(definition.var_axes)
        assert set(trace.workload.inputs) == set(definition.inputs)
        shapes = definition.get_input_shapes(trace.workload.axes)
        assert len(shapes) == len(definition.inputs)
print(found.summary()["passed"])
"""
    count = str(len(list(tmp_path.glob("flashinfer_bench/definitions/*/*.json"))))
    command = [PYTHON, "-c", code, str(tmp_path / "flashinfer_bench"), count]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(of_kind(flashinfer_files(made()), "traces"))
