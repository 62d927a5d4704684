"""gelu, softmax and cross_entropy on the device at hand: every GPU seed, every check case."""

import pytest
import torch
from kagent_sandbox.data.task import draw_hidden, load_task
from seed_cases import SEEDS, arguments, import_seed, worst_share

pytestmark = pytest.mark.gpu

TASKS = ("gelu", "softmax", "cross_entropy")
FILES = [f for name in TASKS for f in sorted((SEEDS / name).glob("*_*.py"))]
FILES = [f for f in FILES if not f.stem.startswith("cpp_")]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_seed_is_within_the_contract_on_the_device(file, monkeypatch):
    task, seed = load_task(file.parent), import_seed(file)
    reference, entry = task.reference(), getattr(seed, task.entry)
    for case in (*task.gpu.check, *draw_hidden(task, "gpu", "check", 7)):
        given = arguments(task, reference, case, seed=8, device="cuda")
        assert worst_share(task, reference, given, entry(*given.values())) <= 1, case.name


@pytest.mark.parametrize("name", ["softmax", "cross_entropy"])
@pytest.mark.parametrize("elements", [16, 32, 64])
@pytest.mark.parametrize("threads", [256, 1024])
def test_cluster_seed_in_other_layouts(name, elements, threads, monkeypatch):
    """Clusters of 1 to 8 blocks, rows that do not fill them, and rows that fit none."""
    task = load_task(SEEDS / name)
    seed, reference = import_seed(SEEDS / name / "cuda_cluster.py"), task.reference()
    monkeypatch.setattr(seed, "ELEMENTS", elements)
    monkeypatch.setattr(seed, "THREADS", threads)
    for columns in (1000, 32768, 50_001, 131_072, 600_000):
        dims = {"name": f"{columns}", "M": 3, "N": columns}
        case = task.gpu.check[0].model_copy(update=dims)
        given = arguments(task, reference, case, seed=9, device="cuda")
        results = getattr(seed, task.entry)(*given.values())
        assert worst_share(task, reference, given, results) <= 1, columns


def test_softmax_of_masked_rows_is_as_torch_has_it():
    x = torch.randn(4, 131_072, device="cuda")
    x[0, :130_000] = -torch.inf  # whole warps and whole blocks of a cluster hold nothing but -inf
    x[1] = -torch.inf
    x[2, 7:] = -torch.inf
    for file in FILES:
        if file.parent.name == "softmax":
            y = import_seed(file).softmax(x)
            torch.testing.assert_close(y, torch.softmax(x, -1), equal_nan=True)
            assert (y[0, :130_000] == 0).all(), file.stem
