"""attention and linear_cross_entropy on the device at hand: GPU seeds, experts, full sizes."""

import pytest
import torch
from kagent_sandbox.data.task import draw_hidden, load_task
from seed_cases import SEEDS, arguments, import_seed, worst_share

pytestmark = pytest.mark.gpu

TASKS = ("attention", "linear_cross_entropy")
FILES = [f for name in TASKS for f in sorted((SEEDS / name).glob("*_*.py"))]
FILES = [f for f in FILES if not f.stem.startswith("cpp_")]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_seed_is_within_the_contract_on_the_device(file):
    task, seed = load_task(file.parent), import_seed(file)
    reference, entry = task.reference(), getattr(seed, task.entry)
    for case in (*task.gpu.check, *draw_hidden(task, "gpu", "check", 7), task.gpu.bench[0]):
        given = arguments(task, reference, case, seed=8, device="cuda")
        assert worst_share(task, reference, given, entry(*given.values())) <= 1, case.name


@pytest.mark.parametrize("block_m", [64, 128])
@pytest.mark.parametrize(("block_n", "stages"), [(32, 3), (64, 2), (128, 2)])
def test_cuda_attention_in_other_tiles(block_m, block_n, stages, monkeypatch):
    task = load_task(SEEDS / "attention")
    seed, reference = import_seed(SEEDS / "attention" / "cuda_flash.py"), task.reference()
    for name, value in {"BLOCK_M": block_m, "BLOCK_N": block_n, "STAGES": stages}.items():
        monkeypatch.setattr(seed, name, value)
    for case in task.gpu.check:
        given = arguments(task, reference, case, seed=9, device="cuda")
        assert worst_share(task, reference, given, seed.attention(*given.values())) <= 1, case.name


@pytest.mark.parametrize("vocab", [16392, 65536, 128256, 262144])  # clusters of 1, 1, 2 and 4
def test_logits_in_registers_of_clusters(vocab, monkeypatch):
    """Rows that cuda_rows streams, which the task's own checks have none of."""
    task = load_task(SEEDS / "linear_cross_entropy")
    seed, reference = import_seed(SEEDS / "linear_cross_entropy" / "cuda_rows.py"), task.reference()
    monkeypatch.setattr(seed, "CHUNK", 200)  # the last one has less rows than clusters
    for case in task.gpu.check:
        if case.name.startswith(("a_column_more", "many_tokens")):
            continue
        dims = {"V": vocab, "T": 501}
        given = arguments(task, reference, case.model_copy(update=dims), seed=9, device="cuda")
        results = seed.linear_cross_entropy(*given.values())
        assert worst_share(task, reference, given, results) <= 1, case.name


@pytest.mark.parametrize("name", TASKS)
def test_experts_are_within_the_contract(name):
    """So is what users would pick instead: the tolerances are no narrower than the field."""
    task = load_task(SEEDS / name)
    reference = task.reference()
    # Shapes that all of them take.
    dims = {"H": 16, "Hkv": 16} if name == "attention" else {"T": 2048, "D": 1024}
    case = task.gpu.bench[0].model_copy(update=dims)
    given = arguments(task, reference, case, seed=10, device="cuda")
    for expert, call in reference.experts().items():
        assert worst_share(task, reference, given, call(**given)) <= 1, expert
    compiled = torch.compile(reference.eager, dynamic=False)
    assert worst_share(task, reference, given, compiled(**given)) <= 1
