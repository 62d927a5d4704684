"""What is known of a reference's run changes no result of the next ones, only their work."""

from pathlib import Path

import pytest
import torch
from kagent_sandbox.judge.check.known_results import KnownResults
from kagent_sandbox.judge.check.omissions import OmissionRecorder, Omitter
from torch.utils._python_dispatch import TorchDispatchMode

FILE = Path(__file__)


def layers(x, a, b):
    """A matrix times vectors (which torch squeezes in place), and a product apart from it."""
    y = torch.matmul(x.double(), a.double())
    y = torch.relu(torch.matmul(y, b.double()))
    return y + (a.double() @ b.double()).sum(0)


def in_place(x, a, b):
    y = x.double() * 2
    z = y.exp()
    y.mul_(a[0])
    y += 1
    view = z.view(2, -1)
    view[0].zero_()
    return torch.cat([y, z, y.exp(), (x.double() * 2).exp()]) + b.sum()


def two_results(x, a, b):
    values, places = (a @ b).sort(-1)
    return values + places + torch.var_mean(a, -1)[0] + x


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator) for n in ((6,), (6, 6), (6, 6))]


def attempt(function, given, omission, known):
    try:
        with Omitter(FILE, omission, known):
            return function(*given)
    except RuntimeError as e:  # a shape that the rest cannot take
        return str(e)


@pytest.mark.parametrize("function", [layers, in_place, two_results])
def test_what_is_known_changes_no_result(function):
    given = tensors()
    expected = function(*given)
    with OmissionRecorder(FILE) as recorder:
        found = function(*given)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(recorder.found) >= 3
    for _ in range(2):  # the first pass leaves everything as it was
        for omission in recorder.found:
            found, right = (
                attempt(function, given, omission, known)
                for known in (recorder.known, KnownResults())
            )
            if isinstance(right, str):
                assert found == right
            else:
                torch.testing.assert_close(
                    found, right, rtol=0, atol=0, equal_nan=True, msg=str(omission)
                )


def test_what_does_not_follow_from_an_omission_is_not_computed_again():
    given = tensors()
    with OmissionRecorder(FILE) as recorder:
        layers(*given)
    (relu,) = (o for o in recorder.found if o.operation == "relu")
    with Counted() as counted, Omitter(FILE, relu, recorder.known):
        layers(*given)
    assert not {"mm", "_to_copy", "sum"} & set(counted.names)
    assert "add" in counted.names
