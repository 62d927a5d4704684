"""Tasks of training and inference on the device at hand: every GPU seed, every check case."""

import pytest
from kagent_sandbox.data.task import draw_hidden, load_task
from seed_cases import SEEDS, TRAINING_TASKS, arguments, import_seed, outputs, worst_share

pytestmark = pytest.mark.gpu

FILES = [
    file
    for name in TRAINING_TASKS
    for language in ("triton", "gluon", "cuda")
    for file in (SEEDS / name).glob(f"{language}_*.py")
]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_seed_is_within_the_contract_on_the_device(file):
    task, seed = load_task(file.parent), import_seed(file)
    reference = task.reference()
    for case in (*task.gpu.check, *draw_hidden(task, "gpu", "check", 7)):
        given = arguments(task, reference, case, seed=8, device="cuda")
        results = outputs(task, getattr(seed, task.entry), given)
        assert worst_share(task, reference, given, results) <= 1, case.name
