import json

import pytest
from flashinfer_definitions import norm, write
from kagent.authoring.importers.flashinfer.exchange import (
    Definition,
    Solution,
    Trace,
    read_definition,
    read_solution,
    read_traces,
)
from kagent.export.flashinfer import flashinfer_files
from kagent_sandbox.errors import UserError
from synthetic_library import cpu_library, gpu_library


@pytest.mark.parametrize("made", [cpu_library, gpu_library])
def test_what_kagent_exports_keeps_the_format_s_rules(made):
    records = {"definitions": Definition, "solutions": Solution, "traces": Trace}
    seen = set()
    for path, text in flashinfer_files(made()).items():
        record = records.get(path.split("/")[1], Trace)
        for line in text.splitlines() if path.endswith("l") else [text]:
            record.model_validate(json.loads(line, parse_constant=pytest.fail))
            seen.add(record)
    assert seen == {Definition, Solution, Trace}


SPEC = {"language": "triton", "target_hardware": ["cuda"], "entry_point": "main.py::run"}


def solution(**changes):
    return {
        "name": "fast",
        "definition": "norm",
        "author": "me",
        "spec": SPEC,
        "sources": [{"path": "main.py", "content": "def run(x): return x"}],
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sources": []}, "sources: "),
        ({"sources": [{"path": "../main.py", "content": ""}]}, "no path inside of the solution"),
        ({"sources": [{"path": "other.py", "content": ""}]}, "no source 'main.py': there are othe"),
        ({"spec": {**SPEC, "entry_point": "run"}}, "expected FILE::FUNCTION"),
        ({"name": None}, "name: Input should be a valid string"),
    ],
)  # fmt: skip
def test_a_broken_solution_is_one_line_that_names_the_key(tmp_path, changes, says):
    path = tmp_path / "s.json"
    path.write_text(json.dumps(solution(**changes)))
    with pytest.raises(UserError, match=says) as found:
        read_solution(path)
    assert str(found.value).startswith(f"{path}: ")
    assert "\n" not in str(found.value)


def test_a_definition_names_its_axes(tmp_path):
    broken = norm(outputs={"y": {"shape": ["rows", "cols"], "dtype": "float32"}})
    with pytest.raises(UserError, match="y: no axis 'cols': there are rows, hidden"):
        read_definition(write(tmp_path, broken))


def test_nan_is_no_number(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('\n{"definition": "a", "workload": NaN}\n')
    with pytest.raises(UserError, match=r"t.jsonl:2: no JSON: NaN is no number"):
        read_traces(path)


@pytest.mark.parametrize(
    ("status", "parts", "fine"),
    [
        ("PASSED", {"correctness": {}, "performance": {}}, True),
        ("PASSED", {"correctness": {}}, False),
        ("INCORRECT_NUMERICAL", {"correctness": {}}, True),
        ("RUNTIME_ERROR", {"performance": {}}, False),
        ("COMPILE_ERROR", {}, True),
    ],
)
def test_a_trace_has_what_its_status_says(status, parts, fine):
    evaluation = {"status": status, "environment": {"hardware": "x"}, "timestamp": "now", **parts}
    trace = {
        "definition": "a",
        "solution": "b",
        "workload": {"axes": {}, "inputs": {}, "uuid": "0"},
        "evaluation": evaluation,
    }
    if fine:
        assert Trace.model_validate(trace).evaluation.status == status
    else:
        with pytest.raises(ValueError, match=r"PASSED|compared"):
            Trace.model_validate(trace)
