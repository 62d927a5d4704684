"""A certification where kagent refuses what a library took for a task."""

from dataclasses import replace

import pytest
from kagent.export.certify import measure_each
from kagent_sandbox.errors import MachineError, TaskError
from synthetic_library import cpu_library

REFUSED = "# of a kagent that had no such rule"


class Host:
    """Measures what has not that mark; whatever it is asked is counted."""

    def __init__(self, broken=False):
        self.broken = broken
        self.asked = []

    def measure(self, wanted, say):
        self.asked.append(len(wanted))
        for each in wanted:
            file = each.task.folder / "reference.py"
            if REFUSED in file.read_text():
                raise TaskError(f"{file}: inputs: case c: plant one always")
        if self.broken:
            raise MachineError("no device")
        return [f"times of {each.task.name}" for each in wanted]


@pytest.fixture
def wanted():
    return [(o, o.kernels, "cpu") for o in cpu_library().operators][:3]


def refused(operators, *which):
    return [
        (replace(o, reference_py=o.reference_py + REFUSED) if i in which else o, kernels, kind)
        for i, (o, kernels, kind) in enumerate(operators)
    ]


def test_all_operators_are_measured_at_once(wanted):
    host = Host()
    found = measure_each(wanted, host, print)
    assert found == [f"times of {o.task}" for o, *_ in wanted]
    assert host.asked == [len(wanted)]


def test_an_operator_whose_task_is_refused_says_so_and_keeps_nobody_else(wanted):
    host, said = Host(), []
    first, *others = measure_each(refused(wanted, 0), host, said.append)
    assert isinstance(first, TaskError)
    assert str(first) == (
        "this version of kagent refuses the task that the library has (reference.py: inputs: case "
        "c: plant one always): export the operator again"
    )
    assert others == [f"times of {o.task}" for o, *_ in wanted[1:]]
    assert host.asked == [len(wanted)] + [1] * len(wanted)
    assert "one operator after the other" in said[0]


def test_a_single_one_is_asked_once(wanted):
    host = Host()
    (found,) = measure_each(refused(wanted[:1], 0), host, print)
    assert isinstance(found, TaskError)
    assert host.asked == [1]


def test_other_errors_end_it(wanted):
    with pytest.raises(MachineError, match="no device"):
        measure_each(wanted, Host(broken=True), print)
