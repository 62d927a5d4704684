"""The CUDA seed of softmax's gradient with words of every width, run on the CPU and built."""

import math

import pytest
import torch
from cuda_on_cpu import CudaOnCpu
from kagent_sandbox.data.build import BuildRequest, Built
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.task import load_task
from seed_cases import SEEDS, import_seed

FILE = SEEDS / "softmax_backward" / "cuda_packed.py"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("dtype", "rows", "columns", "padding", "offset", "instance"),
    [
        (torch.float32, 9, 33, 0, 0, "unsigned, 2, 32, 4, 1"),
        (torch.float32, 3, 1325, 0, 0, "unsigned, 16, 96, 1, 1"),
        (torch.float32, 3, 1500, 4, 2, "uint2, 8, 96, 1, 1"),
        (torch.bfloat16, 3, 3001, 0, 0, "unsigned short, 16, 32, 4, 8"),  # a cluster
        (torch.bfloat16, 3, 3002, 0, 0, "unsigned, 16, 32, 4, 4"),
        (torch.bfloat16, 3, 3000, 8, 0, "uint4, 4, 32, 4, 4"),
    ],
)
def test_rows_are_kept_in_words_of_any_width(
    dtype, rows, columns, padding, offset, instance, tmp_path, monkeypatch
):
    seed, machine = import_seed(FILE), CudaOnCpu(tmp_path)
    names = []

    def cuda_kernel(name, source, *, defines):
        names.append(name)
        return machine.cuda_kernel(name, source, defines=defines)

    monkeypatch.setattr(seed, "cuda_kernel", cuda_kernel)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    if columns >= 3000:
        monkeypatch.setattr(seed, "THREADS", 32)  # so that a short row is spread over blocks

    generator = torch.Generator().manual_seed(1)
    given = []
    for drawn in torch.randn(2, rows, columns, generator=generator):
        whole = torch.full((offset + rows * (columns + padding),), math.nan, dtype=dtype)
        tensor = whole.as_strided((rows, columns), (columns + padding, 1), offset)
        given.append(tensor.copy_(drawn))
    grad, y = given
    exact = y.double() * (grad.double() - (grad.double() * y.double()).sum(1, keepdim=True))
    for machine.reversed_threads in (False, True):
        monkeypatch.setattr(seed, "STREAM_STORES", machine.reversed_threads)
        found = seed.softmax_backward(grad, y).double()
        torch.testing.assert_close(found, exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
    kernel = f"softmax_backward_words<{seed.TYPES[dtype]}, {instance}>"
    assert names == [kernel, kernel]


def test_rows_that_start_anywhere_are_read_once_and_do_not_spill(builder):
    task = load_task(FILE.parent)
    base = task.gpu.check[0]
    sizes = [
        {"dtype": "float32", "N": 8423},
        {"dtype": "float32", "N": 65535},
        {"dtype": "float32", "N": 1500, "offset": 2},
        {"dtype": "bfloat16", "N": 1021, "noncontiguous": True},
        {"dtype": "bfloat16", "N": 65534},
        {"dtype": "float16", "N": 8204},
        {"dtype": "float16", "N": 65535},
    ]
    cases = tuple(
        build_case(task, base.model_copy(update={"name": str(i), "M": 40, **size}))
        for i, size in enumerate(sizes)
    )
    built = builder.build(BuildRequest(FILE.read_text(), task.entry, "sm_90a", cases, task.allow))
    assert isinstance(built, Built), built
    widths = {}
    for (_, name), plan in built.plans.items():
        (kernel,) = plan.kernels
        assert "softmax_backward_words" in kernel.name
        assert kernel.spill_bytes == 0
        (widths[int(name)],) = kernel.load_bytes
    assert [widths[i] for i in range(len(sizes))] == [4, 4, 8, 2, 4, 8, 2]
