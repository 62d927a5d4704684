"""Seeds that go over elements in order move 16 bytes at a time, however many elements there are."""

import pytest
from kagent.evolve.open_machine import request_maker
from kagent.tasks import find_task
from kagent_sandbox.data.build import Built

SEEDS = [
    ("gelu", "triton_flat.py"),
    ("gelu", "triton_persistent.py"),
    ("gelu_backward", "triton_flat.py"),
    ("adamw", "triton_flat.py"),
    ("adamw_tensors", "triton_chunks.py"),
]


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_full_blocks_are_loaded_16_bytes_at_a_time(name, seed, builder):
    """Elements are a multiple of 8: only of 16 does the compiler see that a mask ends at a word."""
    task = find_task(name)
    sizes = {"name": "odd", "M": 7043, "N": 7944}
    case = task.gpu.bench[0].model_copy(update=sizes)
    source = (task.folder / seed).read_text()
    built = builder.build(request_maker(task, "sm_90a", (case,), 1)(source))
    assert isinstance(built, Built), built
    plan = built.plans[0, "odd"]
    loads = {k.name: k.load_bytes for k in plan.kernels}
    assert all(widths.get(16) for widths in loads.values()), loads
