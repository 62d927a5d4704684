"""Views of symbolic tensors lie where torch's own views lie, whatever the chain of operations."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kagent_sandbox.builder.policy import PolicyError, allows
from kagent_sandbox.builder.trace.dispatch import Factories, TraceDispatch
from kagent_sandbox.builder.trace.recorder import Recorder
from kagent_sandbox.builder.trace.torch_stubs import no_garbage_collection
from kagent_sandbox.data.plan import Alloc, Const, Copy, Fill
from kagent_sandbox.data.target import parse_target
from kagent_sandbox.errors import UserError

CUDA = torch.device("cuda", 0)

STEPS = {
    "transpose": lambda t, a, b: t.transpose(a % t.dim(), b % t.dim()),
    "select": lambda t, a, b: t.select(a % t.dim(), b % t.shape[a % t.dim()]) if t.dim() > 1 else t,
    "slice": lambda t, a, b: t.narrow(a % t.dim(), *span(t.shape[a % t.dim()], b)),
    "step": lambda t, a, b: t[:: 1 + b % 3],
    "unsqueeze": lambda t, a, b: t.unsqueeze(a % (t.dim() + 1)) if t.dim() < 6 else t,
    "expand": lambda t, a, b: t.unsqueeze(0).expand(1 + b % 3, *t.shape) if t.dim() < 6 else t,
    "reverse": lambda t, a, b: t.permute(*range(t.dim() - 1, -1, -1)),
    "flatten": lambda t, a, b: t.reshape(-1),
    "contiguous": lambda t, a, b: t.contiguous(),
    "dtype": lambda t, a, b: (
        t.view(torch.int16) if (t.stride(-1), t.itemsize) == (1, 4) and t.is_contiguous() else t
    ),
}
CHAINS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=8
)


def span(size, b):
    return b % size, size - b % size


def recording(**options):
    return Recorder(CUDA, "sm_90a", **options)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """The recorder collects garbage at every allocation: only its own, please."""
    with no_garbage_collection():
        yield


@settings(deadline=None)
@given(chain=CHAINS, shape=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_views_agree_with_torch(chain, shape):
    real = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    meta = real.to("meta")
    with recording() as recorder, TraceDispatch(CUDA), Factories(CUDA):
        symbolic = recorder.input("x", meta)
        copies = 0
        for name, a, b in chain:
            before = real.untyped_storage().data_ptr()
            real, symbolic = STEPS[name](real, a, b), STEPS[name](symbolic, a, b)
            copies += real.untyped_storage().data_ptr() != before
            ref = recorder.tensor(symbolic)
            assert ref.shape == tuple(real.shape)
            assert ref.strides == tuple(real.stride())
            assert ref.offset == real.storage_offset()
            assert symbolic.data_ptr() % 16 == ref.offset * symbolic.itemsize % 16
            low, high = ref.extent_bytes
            assert 0 <= low <= high <= recorder.buffers[ref.buffer].nbytes
        assert sum(isinstance(op, Copy) for op in recorder.ops) == copies
        assert sum(isinstance(op, Alloc) for op in recorder.ops) == copies


@given(
    st.lists(st.floats(width=32, allow_nan=False) | st.integers(-100, 100), min_size=2, max_size=20)
)
def test_constants_hold_their_bytes(values):
    with recording() as recorder, TraceDispatch(CUDA), Factories(CUDA):
        made = torch.tensor(values, dtype=torch.float32, device="cuda")
        assert made.device == CUDA
    const = recorder.ops[-2] if len(recorder.ops) > 2 else recorder.ops[-1]
    assert isinstance(const, Const)
    assert const.data == torch.tensor(values, dtype=torch.float32).numpy().tobytes()


def test_everything_claims_the_target_device():
    meta = torch.empty(4, 4, device="meta")
    with recording() as recorder, TraceDispatch(CUDA), Factories(CUDA):
        x = recorder.input("x", meta)
        for y in (x.t(), x[1:], x.clone(), torch.zeros_like(x), x.new_empty(3), x.half(), x.data):
            assert (y.device, y.is_cuda, y.is_cpu, y.get_device()) == (CUDA, True, False, 0)
            assert isinstance(y, torch.Tensor)
            assert not y.requires_grad


def test_writes_to_inputs_need_permission():
    meta = torch.empty(4, device="meta")
    with recording() as recorder, TraceDispatch(CUDA):
        x = recorder.input("x", meta)
        with pytest.raises(PolicyError, match="writes the input 'x'"):
            x[1:].zero_()
        assert recorder.violation is not None
    with recording(mutates=("x",)) as recorder, TraceDispatch(CUDA):
        x = recorder.input("x", meta)
        x[1:].zero_()
        assert isinstance(recorder.ops[-1], Fill)


def test_a_tensor_does_not_outlive_its_trace():
    meta = torch.empty(4, device="meta")
    with recording() as recorder, TraceDispatch(CUDA):
        x = recorder.input("x", meta)
    with pytest.raises(PolicyError, match="outlives"):
        _ = x.device


@pytest.mark.parametrize(
    ("allow", "name", "allowed"),
    [
        ("aten::mm", "aten::mm.out", True),
        ("mm", "aten::mm", True),
        ("torch.mm", "aten::mm", True),
        ("aten::mm.out", "aten::mm", True),
        ("aten::mm", "aten::bmm", False),
        ("aten::mm", "aten::addmm_", False),
        ("aten::addmm", "aten::addmm_", True),
        ("softmax", "aten::_softmax", True),
    ],
)
def test_names_of_allowed_operations(allow, name, allowed):
    assert allows([allow], name) is allowed


@pytest.mark.parametrize(
    "name", ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_103", "sm_120"]
)
def test_targets(name):
    target = parse_target(name)
    assert target.major * 10 + target.minor == target.capability
    assert target.shared_per_block < target.shared_per_multiprocessor


@pytest.mark.parametrize("name", ["", "sm_", "sm_1", "gfx90a", "90", "sm_90x", "CPU"])
def test_unknown_targets_are_the_users_error(name):
    with pytest.raises(UserError, match="unknown target"):
        parse_target(name)
