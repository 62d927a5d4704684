from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from kagent_sandbox.judge.arena import placement
from kagent_sandbox.judge.arena.placement import _fill
from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Counts what torch is asked to run on memory."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@given(size=st.integers(0, 40), nbytes=st.integers(0, 300), at_once=st.integers(0, 70))
def test_memory_holds_stale_values_again_and_again(size, nbytes, at_once):
    stale = torch.arange(size, dtype=torch.uint8)
    memory = torch.full((nbytes,), 200, dtype=torch.uint8)
    with mock.patch.object(placement, "_FILLED_AT_ONCE", at_once):
        _fill(memory, stale)
    expected = [i % size for i in range(nbytes)] if size else [0xFF] * nbytes
    assert memory.tolist() == expected


def test_the_workspace_of_a_loss_takes_few_copies():
    """One at a time, 4 bytes took 16 million."""
    memory = torch.empty(64 << 20, dtype=torch.uint8)
    with Counted() as counted:
        _fill(memory, torch.arange(4, dtype=torch.uint8))
    assert counted.names.count("copy_") <= 8
    assert memory[-8:].tolist() == [0, 1, 2, 3] * 2
