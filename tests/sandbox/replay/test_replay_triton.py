"""Triton's launches as a recorder of real tensors sees them: the builder's plans, once more.

Triton compiles for real; in place of a GPU is a driver that loads and launches nothing, and tensors
lie on the CPU.
"""

import itertools

import pytest
import torch
import triton
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.builder.configs import pin_config
from kagent_sandbox.builder.trace import dispatch
from kagent_sandbox.builder.trace.symbolic import SymbolicTensor
from kagent_sandbox.builder.trace.triton import Driver
from kagent_sandbox.data.build import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.data.target import parse_target
from kagent_sandbox.replay import triton as replay_triton
from kagent_sandbox.replay.difference import first_difference
from kagent_sandbox.replay.recorder import Operations, RealRecorder, Values
from seed_cases import import_seed

TARGET = "sm_90a"
CASE = BuildCase(
    "small",
    (TensorSpec("x", (64, 512), (512, 1), "float32"),),
    (TensorSpec("y", (64, 512), (512, 1), "float32"),),
)
SOURCE = """
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.autotune(
    [triton.Config({"BLOCK": 128}, num_warps=2), triton.Config({"BLOCK": 256}, num_warps=4)],
    key=["n"],
)
@triton.jit
def add(x_ptr, y_ptr, n, by, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + by, mask=i < n)


@triton.jit
def double(x, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS
    tile = x.load([row, 0])
    r = row + tl.arange(0, ROWS)[:, None]
    tl.store(y_ptr + r * COLUMNS + tl.arange(0, COLUMNS)[None, :], 2 * tile)


@triton.jit
def copied(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, [ROWS, COLUMNS], [COLUMNS, 1], [16, 64])
    y = tl.make_tensor_descriptor(y_ptr, [ROWS, COLUMNS], [COLUMNS, 1], [16, 64])
    y.store([0, 0], x.load([0, 0]))


def entry(x):
    y, z = torch.zeros_like(x), torch.empty_like(x)
    n = x.numel()
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n, 1.5)
    double[(4,)](TensorDescriptor.from_tensor(y, [16, 512]), z, 16, 512, num_warps=8)
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]), 1, 1)](z[1:], y, n - 512, OFFSET)
    triton.set_allocator(
        lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=x.device)
    )
    copied[(1,)](y, z, 64, 512)
    return z


OFFSET = 2
TUNE = {"OFFSET": [2, 3]}
"""


class Machine(Driver):
    """Loads and launches nothing, as a GPU would be seen by Triton."""

    class launcher_cls:
        def __init__(self, src, metadata):
            pass

        def __call__(self, x, y, z, stream, function, *rest):
            assert isinstance(function, int)

    def __init__(self, target):
        super().__init__(target)
        handles, load = itertools.count(1000), self.utils.load_binary

        def load_binary(name, binary, shared, device):
            module, _, *rest = load(name, binary, shared, device)
            return (module, next(handles), *rest)

        self.utils.load_binary = load_binary


@pytest.fixture(scope="module")
def built(shared):
    with Builder() as builder:
        found = builder.build(BuildRequest(SOURCE, "entry", TARGET, (CASE,), max_configs=4))
    assert isinstance(found, Built), found
    return found


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.knobs.compilation, "disable_line_info", True)
    monkeypatch.setattr(triton.runtime.driver, "_active", Machine(parse_target(TARGET)))
    replay_triton.install()


def replayed(tmp_path, config, source=SOURCE):
    """The plan of what it does on tensors of the CPU."""
    path = tmp_path / "kernel.py"
    path.write_text(source)
    module = import_seed(path)
    pin_config(module, config)
    device = torch.device("cpu")
    recorder = RealRecorder(device, TARGET, (), ["x"])
    SymbolicTensor.on_operation = staticmethod(lambda f, a, k: dispatch.handle(f, a, k, device))
    x = torch.randn(64, 512)
    recorder.argument("x", x)
    with recorder, Values(recorder), Operations(recorder):
        result = module.entry(x)
        return recorder.plan([recorder.tensor(result)])


@pytest.mark.nightly
@pytest.mark.usefixtures("machine")
def test_every_configuration_is_the_builders_plan(built, tmp_path):
    assert len(built.configs) == 4
    for index, config in enumerate(built.configs):
        done = replayed(tmp_path, config)
        assert first_difference(built.plans[index, "small"], done) is None
        others = [built.plans[i, "small"] for i in range(4) if i != index]
        assert all(first_difference(other, done) is not None for other in others)


@pytest.mark.sampled(one_in=5)
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("honest", "other", "says"),
    [
        ("2 * tile", "3 * tile", "launch with kernel"),
        ("[16, 512]), z, 16", "[16, 512]), z[16:], 16", "launch with arguments"),
        ("num_warps=8", "num_warps=8, launch_pdl=True", "pdl True"),
        ("double[(4,)]", "double[(3,)]", "launch with grid (3, 1, 1)"),
        ("zeros_like(x), ", "empty_like(x), ", "is launch, the plan's fill"),
    ],
)
def test_differences_are_seen(built, tmp_path, honest, other, says):
    assert honest in SOURCE
    done = replayed(tmp_path, built.configs[0], SOURCE.replace(honest, other))
    assert says in first_difference(built.plans[0, "small"], done)
