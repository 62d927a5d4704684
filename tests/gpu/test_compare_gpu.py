"""The judge's own kernels on a GPU."""

import contextlib

import error_sums
import pytest
import torch
from cuda.bindings import driver
from kagent.tasks import find_task
from kagent_sandbox.device import device_memory
from kagent_sandbox.device.cuda.traits import TRAITS
from kagent_sandbox.errors import DeviceFull
from kagent_sandbox.judge.check.inputs import InputSampler

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_kernels_make_the_sums_of_torchs_operations():
    assert error_sums.check("cuda") == 1890


@contextlib.contextmanager
def memory_of_others(nbytes):
    """Memory that this process's torch knows nothing of, as if another process had it."""
    status, pointer = driver.cuMemAlloc(nbytes)
    assert status == driver.CUresult.CUDA_SUCCESS, status
    try:
        yield
    finally:
        driver.cuMemFree(pointer)


def test_a_reference_without_memory_beside_others_is_computed_on_the_host():
    task, device = find_task("softmax").calibrated("gpu"), torch.device("cuda")
    case = next(c for c in task.gpu.bench if c.name == "bf16_16384x4096")
    sampler = InputSampler(task, device, TRAITS.inputs)
    draw = sampler.fresh(case)
    (known,) = sampler.expected(draw)
    assert known.is_cuda
    places = [torch.tensor([7, 1 << 20], device=device)]
    (exact,) = sampler.exact_spot_checks(draw, places)
    errors = sampler.torch_errors(draw)
    known, draw.known_results, draw.known_errors = known.cpu(), None, None
    torch.cuda.empty_cache()
    device_memory.begin_request(device)
    free, _ = torch.cuda.mem_get_info()
    rest = 2 * task.min_bytes(case)  # for eager and inputs, and not for float64
    with memory_of_others(int(free - rest)):
        with pytest.raises(DeviceFull) as full:
            sampler.expected(draw)
        assert sampler.compute_on_host(full.value)
        (there,) = sampler.expected(draw)
        assert there.device.type == "cpu"
        torch.testing.assert_close(there, known, rtol=1e-9, atol=1e-12)
        assert sampler.torch_errors(draw)[0].row == pytest.approx(errors[0].row, rel=1e-3)
        draw.known_results = None
        (again,) = sampler.exact_spot_checks(draw, places)
        assert again.expected.is_cuda
        torch.testing.assert_close(again.expected, exact.expected, rtol=1e-9, atol=1e-12)
