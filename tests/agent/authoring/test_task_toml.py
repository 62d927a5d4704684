import tomllib

import pytest
from kagent.authoring.task_toml import task_toml


def task(**changes):
    case = {"name": "small", "dtype": "float32", "M": 3, "causal": True, "scale": 1e-3}
    generator = {"count": 2, "dtype": ["float32"], "dims": {"M": {"min": 1, "max": 9}, "N": [2, 4]}}
    return {
        "name": "toy",
        "summary": 'a "quoted" \\ line\nof two, \x7f and é',
        "entry": "toy",
        "signature": "toy(x) -> y",
        "bytes": "8 * M",
        "flops": "0",
        "matrix": False,
        "dims": {"M": "rows", "N": ""},
        "arguments": [{"name": "x", "shape": ["M", 4], "dtype": "float32"}],
        "results": [{"name": "y", "shape": [], "k": 2.0, "floor": 1e-05}],
        "gpu": {"check": [case], "bench": [case], "hidden_check": [generator]},
        "cpu": {"check": [case], "bench": []},
        **changes,
    }


def test_what_is_written_reads_back():
    assert tomllib.loads(task_toml(task())) == task()


def test_none_is_left_out():
    argument = {"name": "x", "shape": ["M"], "value": None}
    read = tomllib.loads(task_toml(task(written=None, arguments=[argument])))
    assert "written" not in read
    assert read["arguments"] == [{"name": "x", "shape": ["M"]}]


def test_what_toml_has_no_type_for_is_an_error():
    with pytest.raises(TypeError, match="no value of TOML"):
        task_toml(task(summary=object()))
