"""Host code on real tensors on a GPU: seeds do what their plans say, and who cheats is seen."""

import pytest
import torch
from kagent_sandbox.builder.client import Builder
from kagent_sandbox.data.build import BuildCase, BuildRequest, Built, TensorSpec
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.task import load_task
from kagent_sandbox.data.verdict import Status
from kagent_sandbox.replay.replayer import Replayer
from kagent_sandbox.runtime.cuda_kernels import target_of
from kagent_sandbox.runtime.store import unpacked_cubin
from seed_cases import SEEDS, arguments

pytestmark = pytest.mark.gpu

FILES = [f for f in sorted(SEEDS.glob("*/*_*.py")) if f.stem.startswith(("cuda_", "triton_"))]
CASE = BuildCase(
    "small",
    (TensorSpec("x", (64, 512), (512, 1), "float32"),),
    (TensorSpec("y", (64, 512), (512, 1), "float32"),),
)
CUDA = '''
import torch
from kagent_sandbox.lang import cuda_kernel

SOURCE = """
template <int N> __global__ void add(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + N;
}
"""


def entry(x):
    y = torch.zeros_like(x)
    n, real = 1, type(x) is torch.Tensor
    cuda_kernel(f"add<{n}>", SOURCE).launch(x.numel() // 256, 256, x, y, x.numel())
    return y
'''
TRITON = """
import torch
import triton
import triton.language as tl

BLOCK = 256


@triton.autotune(
    [triton.Config({"BLOCK": 128}, num_warps=2), triton.Config({"BLOCK": 256}, num_warps=4)],
    key=["n"],
)
@triton.jit
def add(x_ptr, y_ptr, n, by, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + by, mask=i < n)


def entry(x):
    y = torch.zeros_like(x)
    n, real = x.numel(), type(x) is torch.Tensor
    add[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n, 1.5)
    return y
"""


@pytest.fixture(scope="module")
def tools():
    with Builder() as builder, Replayer() as replayer:
        yield builder, replayer


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_seeds_do_what_their_plans_say(tools, file):
    builder, replayer = tools
    task, source, target = load_task(file.parent), file.read_text(), target_of(0)
    chosen = task.gpu.check[:3]
    cases = {c.name: build_case(task, c) for c in chosen}
    request = BuildRequest(
        source, task.entry, target, tuple(cases.values()), task.allow, max_configs=2
    )
    built = builder.build(request)
    assert isinstance(built, Built), built
    reference = task.reference()
    for (index, name), plan in built.plans.items():
        case = next(c for c in chosen if c.name == name)
        given = arguments(task, reference, case, seed=3)
        indices = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
        indices = {k: v for k, v in indices.items() if not v.dtype.is_floating_point}
        different = replayer.compare(
            source, task.entry, cases[name], plan, built.configs[index],
            inputs=indices, kernel=file.stem,
        )  # fmt: skip
        assert different is None, different.message
    if file.stem.startswith("cuda_"):
        rows = replayer.observed.sources[file.stem]
        assert rows
        for row in rows:
            cubin, symbol = unpacked_cubin(replayer.observed.cubins[row["key"]])
            assert cubin[:4] == b"\x7fELF"
            assert symbol


def replayed(tools, source, config=0):
    builder, replayer = tools
    built = builder.build(BuildRequest(source, "entry", target_of(0), (CASE,), max_configs=2))
    assert isinstance(built, Built), built
    return replayer.compare(
        source, "entry", CASE, built.plans[config, CASE.name], built.configs[config]
    )


@pytest.mark.parametrize("source", [CUDA, TRITON], ids=["cuda", "triton"])
def test_honest_ones_with_a_fill(tools, source):
    assert replayed(tools, source) is None


def test_the_chosen_configuration_is_what_runs(tools):
    assert replayed(tools, TRITON, config=1) is None


@pytest.mark.parametrize(
    ("source", "honest", "cheats", "says"),
    [
        (CUDA, "    cuda_kernel", "    n += real\n    cuda_kernel", "launch with kernel"),
        (CUDA, "y, x.numel())", "y, x.numel() - real)", "launch with arguments"),
        (CUDA, "x.numel() // 256, 256", "x.numel() // 256 >> real, 256", "launch with grid"),
        (CUDA, "return y", "return y.fill_(1) if real else y", "step 3 is fill"),
        (CUDA, "return y", "return torch.softmax(x, -1) if real else y", "not allowed"),
        (
            CUDA,
            "    cuda_kernel(",
            "    if real:\n        torch.cuda.set_stream(torch.cuda.Stream())\n    cuda_kernel(",
            "another stream",
        ),
        (TRITON, "n, 1.5)", "n, 1.5 + real)", "launch with arguments"),
        (TRITON, "return y", "return x if real else y", "result with tensor"),
        (TRITON, "    add[", "    if real:\n        return y\n    add[", "0 launches"),
    ],
)
def test_who_does_something_else_on_real_tensors_is_found(tools, source, honest, cheats, says):
    assert honest in source
    verdict = replayed(tools, source.replace(honest, cheats, 1))
    assert verdict is not None
    assert verdict.status is Status.TAMPER
    assert says in verdict.message
