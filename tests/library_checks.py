"""What must hold of a library that the repository keeps, on any machine: without its device, its
operators fall back on torch.
"""

import hashlib
import json
import os

from kagent.export.certify import restored_task
from kagent.export.dispatch_table import portfolio_json
from kagent.export.reading import read_library
from kagent.export.record import TORCH
from kagent.export.references import shipped_reference
from kagent.tasks import find_task, task_names

CALL = """
import importlib, sys, warnings
sys.modules["kagent"] = sys.modules["kagent_sandbox"] = None  # whoever imports them fails
sys.path[:0] = sys.argv[2:]
import torch, harness
warning = importlib.import_module(sys.argv[1] + "._library").FallbackWarning
warnings.simplefilter("ignore", category=warning)
torch.set_num_threads(1)
for path in sorted(harness.TASKS.iterdir()):
    task, operator = harness.Task(path.name), harness.operator_of(path.name)
    function, arguments = harness.function_of(path.name), task.arguments(task.smallest("cpu"))
    task.check(lambda own: operator.op(*own.values()), arguments)
    task.check(lambda own: task.all_results(function, own), arguments)
    checks = harness.checks_for(arguments)
    found = torch.library.opcheck(operator.op, tuple(arguments.values()), test_utils=checks)
    assert set(found.values()) == {"SUCCESS"}, found
    print(path.name)
"""


def operators_called(folder, python):
    """Call every operator on the CPU, in a process without kagent: float64's results, and
    opcheck. `python` is a `BarePython`. Returns their names.
    """
    name = read_library(folder).library.name
    paths = (folder / "tests", folder / "build/torch-universal")
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = python.run("-B", "-c", CALL, name, *map(str, paths), cwd=folder, env=env)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout.split()


def digest_of_original(operator, task):
    """Digest of the task that a library's own copy of it was made of: its own. Functions of
    kagent's that reference.py imports are written into the copy: then that of the task as it is
    here, or, where it has changed since, the one that all kernels name.
    """
    original = find_task(operator.task) if operator.task in task_names() else task
    text = (original.folder / "reference.py").read_text(encoding="utf-8")
    if shipped_reference(original) == text:
        return task.digest
    toml = (original.folder / "task.toml").read_text(encoding="utf-8")
    if (operator.task_toml, operator.reference_py) == (toml, shipped_reference(original)):
        return original.digest
    (named,) = {k.origin.task_digest for k in operator.kernels}
    return named


def require_certified(folder, tmp_path):
    """Its files are those that were written, its kernels those of the record, and its tables and
    tasks say what the record says.
    """
    disk = read_library(folder)
    assert disk.changed() == []
    for operator in disk.library.operators:
        (tmp_path / operator.task).mkdir()
        task = restored_task(operator, tmp_path / operator.task)
        judged_on = digest_of_original(operator, task)
        known = {k.id for k in operator.kernels}
        for kernel in operator.kernels:
            assert kernel.sha256 == hashlib.sha256(kernel.source.encode()).hexdigest()
            assert kernel.id == f"{operator.task}_{kernel.sha256[:8]}"
            assert kernel.origin.task_digest == judged_on
        for point in (p for d in operator.devices for p in d.points):
            assert point.best in {*known, TORCH}
            assert point.config.keys() <= known
        table = disk.package / "portfolio" / f"{operator.task}.json"
        assert json.loads(table.read_text()) == json.loads(portfolio_json(operator))
