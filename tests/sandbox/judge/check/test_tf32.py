"""Torch's own errors where a GPU may compute in TF32."""

import textwrap

import pytest
import torch
from doubling_task import TASK
from kagent_sandbox.data.task import load_task
from kagent_sandbox.device.cuda.traits import TRAITS
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.judge.check.inputs import InputSampler
from kagent_sandbox.judge.check.tf32 import InTf32

REFERENCE = """
import torch

def inputs(case, generator, device):
    shape = case.dims["M"], case.dims["N"]
    x = torch.randn(shape, generator=generator, device=device)
    return {"x": x.to(getattr(torch, case.dtype))}

def filtered(x):
    return EXPRESSION

def reference(x):
    return filtered(x.double())

def eager(x):
    return filtered(x)

def experts():
    return {}
"""
CONVOLUTION = "torch.conv1d(x[:, None], torch.ones(1, 1, 1, dtype=x.dtype))[:, 0]"


@pytest.fixture
def error(tmp_path):
    """Gives torch's own error in a case of an expression of x."""

    def of(expression, policy):
        (tmp_path / "task.toml").write_text(TASK)
        text = textwrap.dedent(REFERENCE).replace("EXPRESSION", expression)
        (tmp_path / "reference.py").write_text(text)
        task = load_task(tmp_path)
        sampler = InputSampler(task, torch.device("cpu"), policy)
        draw = sampler.fresh(task.cpu.bench[0], 1)
        return sampler.torch_errors(draw)[0], sampler.typical_errors(draw.case)[0]

    return of


def test_convolutions_on_a_gpu_err_as_in_tf32_even_where_this_one_does_not(error):
    """Which algorithm cuDNN takes differs from process to process."""
    assert TRAITS.inputs.tf32
    exact = error(CONVOLUTION, InputPolicy())[0]
    assert exact.row < 1e-6
    for found in error(CONVOLUTION, TRAITS.inputs):
        assert 1e-4 < found.row < 1e-3
        assert 1e-4 < found.bias < 1e-3  # bits that are cut off make all products smaller


def test_nothing_else_errs_so(error):
    for found in error("x * 2 + x.mean(-1, keepdim=True)", TRAITS.inputs):
        assert found.row < 1e-6


def test_operands_lose_the_bits_that_tensor_cores_do_not_read():
    x = torch.tensor([[[1 + 2.0**-10, 1 + 2.0**-11, -(1 + 2.0**-11), float("inf")]]])
    with InTf32() as mode:
        kept = torch.conv1d(x, torch.ones(1, 1, 1))
    assert mode.used
    assert kept.flatten().tolist() == [1 + 2.0**-10, 1.0, -1.0, float("inf")]
    with InTf32() as mode:
        doubled = torch.conv1d(x.double(), torch.ones(1, 1, 1).double()) + x * 0
    assert not mode.used
    assert doubled[0, 0, 1] == 1 + 2.0**-11
