"""RMS norm as an operator: values and gradients are torch's, with backward kernels and without."""

import pytest
import torch
import torch.nn.functional as F
from library_package import assemble, calls

FORWARD = """
import torch
CALLS = []
def rms_norm(x, weight, eps):
    CALLS.append(tuple(x.shape))
    assert eps == 1e-6
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)
"""
BACKWARD = """
import torch
CALLS = []
def rms_norm_backward(grad, x, weight, eps):
    CALLS.append(tuple(x.shape))
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed, weighted = x * scale, grad * weight
    dx = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    return dx.contiguous(), (grad * normed).sum(0)
"""


@pytest.fixture(scope="module", params=[False, True], ids=["forward", "trained"])
def library(request, tmp_path_factory):
    name = "rms_trained" if request.param else "rms_forward"
    package = assemble(tmp_path_factory.mktemp(name) / "lib", name, ("rms_norm",))
    package.add_kernel("rms_norm", FORWARD)
    if request.param:
        package.add_kernel("rms_norm_backward", BACKWARD)
    return package.imported(f"{name}_library")


def leaves(*shapes):
    torch.manual_seed(0)
    return tuple(torch.randn(s, requires_grad=True) for s in shapes)


@pytest.mark.parametrize("shape", [(6, 20), (20,), (2, 3, 20)])
@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_values_and_gradients_are_torchs(library, shape, eps):
    x, weight = leaves(shape, 20)
    before = len(calls(library, "rms_norm"))
    y = library.rms_norm.rms_norm(x, weight, eps)
    assert (len(calls(library, "rms_norm")) > before) == (eps == 1e-6)
    expected = F.rms_norm(x, (20,), weight, eps)
    torch.testing.assert_close(y, expected)
    grad = torch.randn(shape)
    found = torch.autograd.grad(y, (x, weight), grad)
    torch.testing.assert_close(found, torch.autograd.grad(expected, (x, weight), grad))


def test_a_backward_kernel_takes_the_gradient_where_the_library_has_one(library):
    x, weight = leaves((6, 20), 20)
    trained = library.rms_norm._gradient is not None
    before = len(calls(library, "rms_norm_backward")) if trained else 0
    library.rms_norm.rms_norm(x, weight).sum().backward()
    if trained:
        assert len(calls(library, "rms_norm_backward")) == before + 1
    assert x.grad.shape == x.shape


def test_second_derivatives_are_torchs(library):
    x, weight = leaves((3, 8), 8)
    twice = []
    for function in (library.rms_norm.rms_norm, lambda x, w: F.rms_norm(x, (8,), w, 1e-6)):
        (first,) = torch.autograd.grad(function(x, weight).pow(2).sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(first.pow(2).sum(), (x, weight)))
    torch.testing.assert_close(*twice, rtol=1e-4, atol=1e-4)


def test_the_operator_passes_opcheck_and_the_module_is_torchs(library):
    x, weight = leaves((6, 20), 20)
    torch.library.opcheck(library.rms_norm._rms_norm.op, (x, weight, 1e-6))
    ours, theirs = library.rms_norm.RMSNorm(20), torch.nn.RMSNorm(20, eps=1e-6)
    torch.testing.assert_close(ours(x), theirs(x))
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours(x.bfloat16()).dtype == theirs(x.bfloat16()).dtype  # another dtype is torch's
    assert ours(x[:0]).shape == (0, 20)
