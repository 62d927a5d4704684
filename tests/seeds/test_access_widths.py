"""Seeds that memory bounds move 16 bytes at a time, whatever their sizes are multiples of."""

import dataclasses
import re

import pytest
from kagent.evolve.open_machine import request_maker
from kagent.tasks import find_task
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.build_case import build_case

SEEDS = [
    ("gelu", "triton_flat.py"),
    ("gelu", "triton_persistent.py"),
    ("gelu_backward", "triton_flat.py"),
    ("adamw", "triton_flat.py"),
    ("adamw_tensors", "triton_chunks.py"),
]
OF_ROWS = [
    ("rms_norm", "triton_rows.py"),
    ("rms_norm_backward", "triton_rows.py"),
    ("softmax", "triton_rows.py"),
    ("softmax", "triton_online.py"),
    ("softmax_backward", "triton_rows.py"),
    ("cross_entropy", "triton_onchip.py"),
    ("cross_entropy", "triton_online.py"),
]
BESIDE_ROWS = {"count_targets", "mean_loss"}
"""Kernels that go over targets and losses, of 8 and 4 bytes, in any number."""


@pytest.fixture(scope="module")
def built(builder):
    """Builds a seed for a case with some changes. Returns its kernels, and their PTX."""

    def build(name, seed, sizes):
        task = find_task(name)
        case = task.gpu.bench[0].model_copy(update={"name": "odd", **sizes})
        request = request_maker(task, "sm_90a", (case,), 1)((task.folder / seed).read_text())
        found = builder.build(dataclasses.replace(request, ptx=True))
        assert isinstance(found, Built), found
        return [(k, found.ptx[k.hash]) for k in found.plans[0, "odd"].kernels]

    return build


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_full_blocks_are_loaded_16_bytes_at_a_time(name, seed, built):
    """Elements are a multiple of 8: only of 16 does the compiler see that a mask ends at a word."""
    loads = {k.name: k.load_bytes for k, _ in built(name, seed, {"M": 7043, "N": 7944})}
    assert all(widths.get(16) for widths in loads.values()), loads


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(("name", "seed"), OF_ROWS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"dtype": "bfloat16", "N": 7944},
        {"dtype": "bfloat16", "N": 8192, "noncontiguous": True},  # a stride of 8200
        {"dtype": "float32", "N": 4100},
    ],
    ids=str,
)
def test_rows_of_whole_words_are_moved_16_bytes_at_a_time(name, seed, sizes, built):
    """16 bytes divide columns and strides, and 16 elements do not."""
    for kernel, ptx in built(name, seed, {"M": 300, **sizes}):
        if kernel.name in BESIDE_ROWS:
            continue
        wide, scalars = kernel.load_bytes.get(16, 0), kernel.load_bytes.get(2, 0)
        assert wide >= 2, (kernel.name, kernel.load_bytes)
        assert scalars <= 1, (kernel.name, kernel.load_bytes)  # the logit of a row's target
        if kernel.name != "sum_of_shares":  # 8 or 32 columns for each program
            assert re.search(r"st\.global\.(L\w+\.)?v4\.b32", ptx), kernel.name


def test_rows_whose_distance_needs_64_bits_share_no_tile_of_rms_norms_gradient(builder):
    """Within a tile places are numbers of 32 bits."""
    task = find_task("rms_norm_backward")
    case = task.gpu.bench[0].model_copy(update={"name": "near", "M": 300, "N": 64})
    near = build_case(task, case)
    apart = tuple(
        dataclasses.replace(a, strides=(2**26, 1)) if getattr(a, "shape", ()) == (300, 64) else a
        for a in near.arguments
    )
    far = dataclasses.replace(near, name="far", arguments=apart)
    text = (task.folder / "triton_rows.py").read_text()
    found = builder.build(BuildRequest(text, task.entry, "sm_90a", (near, far), task.allow))
    assert isinstance(found, Built), found
    threads = {name: plan.launches[0].block[0] for (_, name), plan in found.plans.items()}
    assert threads == {"near": 256, "far": 32}  # 32 rows, 1 row


@pytest.mark.parametrize(
    ("sizes", "loads"),
    [
        ({"dtype": "bfloat16", "N": 2168}, {16: 2 * 5}),  # of x and the weight
        ({"dtype": "bfloat16", "N": 16168}, {16: 2 * 8}),
        ({"dtype": "float32", "N": 8424}, {16: 2 * 5}),
        ({"dtype": "float32", "N": 8423}, {4: 5 * 4 + 4, 16: 4}),  # whole pieces of the weight
        ({"dtype": "float32", "N": 8192, "offset": 2}, {4: 2 * 8 * 4}),
    ],
    ids=str,
)
def test_a_long_row_of_rms_norm_is_loaded_once_in_pieces(sizes, loads, built):
    ((found, _),) = built("rms_norm", "triton_rows.py", {"M": 300, **sizes})
    assert found.name == "rms_norm_in_pieces"
    assert found.load_bytes == loads
    assert found.spill_bytes == 0
