"""The tests' own fixtures hold in the processes that the agent's tests start."""

import subprocess
import sys

import pytest
import warm_python
from kagent_sandbox.process.environment import for_trusted


@pytest.mark.usefixtures("uncompiled", "brief_timing")
def test_nothing_is_compiled_and_no_other_worker_is_waited_for():
    assert for_trusted().keys() >= {"TORCHDYNAMO_DISABLE", "KAGENT_LOCKS", "BRIEF_TIMING"}


@pytest.mark.usefixtures("brief_timing", "warm_processes")
def test_no_neighbour_makes_brief_samples_no_measurement():
    """Half of them lasted until it gave the core back, and so did a request for nothing."""
    program = f"""{warm_python.PROGRAM}
from kagent_sandbox.device.cpu.launcher import RequestCost
from kagent_sandbox.judge.timing.estimates import is_noise
cost = RequestCost()
cost.costs_s.append(4e-3)
print(cost.cost_s, is_noise([100.0] * 12 + [10_000.0] * 12))"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0.0 False\n", "")


def test_a_process_is_started_anew_where_its_template_has_threads(tmp_path, monkeypatch):
    """What inductor imports starts some on a machine with a GPU."""
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(warm_python, "PRELOAD", ("torch", "brief_timing"))
    monkeypatch.setattr(warm_python, "MODULES", {"this": ("starts_a_thread",)})
    monkeypatch.setattr(warm_python, "_templates", {})
    process = warm_python.Popen([sys.executable, "-m", "this"], stdout=subprocess.PIPE)
    assert b"Beautiful is better than ugly." in process.communicate()[0]
    assert process.returncode == 0
    (template,) = warm_python._templates.values()
    assert not template.gone()
    template.close()
