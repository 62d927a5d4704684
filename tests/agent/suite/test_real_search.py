"""A suite's search in the process that makes it, on the CPU."""

import json
import re

import pytest
from commands import run
from doubling_task import PARALLEL, PLAIN, REFERENCE, TASK, kernel_of_passes

pytestmark = pytest.mark.usefixtures("uncompiled", "brief_timing", "warm_processes")


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_a_search_is_made_in_a_process_of_its_own(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    less = re.sub(r"  { name = \"(odd|long)\".*\n", "", TASK)  # one case of each kind
    (tmp_path / "a/task.toml").write_text(less.replace('"double"', '"a"', 1))
    (tmp_path / "a/reference.py").write_text(REFERENCE)
    (tmp_path / "a/cpp_plain.py").write_text(kernel_of_passes(PARALLEL + PLAIN))
    words = ("suite", "run", "a", "--budget", 1, "--device", "cpu")
    done = run(monkeypatch, capsys, *words)
    assert done.code == 0, done.out + done.err
    (problem,) = json.loads(run(monkeypatch, capsys, "suite", "report", "suites/a", "--json").out)[
        "problems"
    ]
    assert (problem["state"], problem["device"]) == ("correct", "cpu")
    assert {"start", "baselines", "search", "race"} <= set(problem["phases"])
    assert sum(problem["phases"].values()) <= problem["seconds"] + 1
