"""Plans of whole candidates: order, frees, identity, configurations, limits."""

from dataclasses import replace

import pytest
import torch
from kagent_sandbox.builder.trace.meta import run_on_meta
from kagent_sandbox.data.plan import Alloc, Copy, Fill, Free, Launch
from kagent_sandbox.data.plan_json import dump_plan
from warm_tracer import tensor, tracer  # noqa: F401 - a fixture

HEAD = "import torch, triton, triton.language as tl\n"
DOUBLE = """
@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)
"""
X, Y = [tensor("x", (64, 32))], [tensor("y", (64, 32))]


def kinds(plan):
    return [type(op).__name__ for op in plan.ops]


def trace(tracer, body, arguments=X, results=Y, **options):  # noqa: F811
    return tracer.trace(HEAD + body, "f", arguments, results, **options)


@pytest.mark.nightly
def test_buffers_are_freed_with_their_last_reference(tracer):  # noqa: F811
    answer = trace(
        tracer,
        """
def f(x):
    a = torch.empty_like(x)
    view = a[2:4]
    del a
    b = torch.empty_like(x)   # `view` still holds a
    del view
    c = torch.empty_like(x)
    return c
""",
    )
    assert [type(o) for o in answer.plan.ops] == [Alloc, Alloc, Free, Alloc, Free]
    assert [o.buffer for o in answer.plan.ops] == [1, 2, 1, 3, 2]
    assert answer.plan.peak_bytes == 2 * 64 * 32 * 4


@pytest.mark.nightly
def test_tensors_held_by_a_cycle_are_freed_at_the_next_allocation(tracer):  # noqa: F811
    answer = trace(
        tracer,
        """
def f(x):
    def cycle():
        a = torch.empty_like(x)
        box = [a]
        box.append(box)
    cycle()
    return torch.empty_like(x)
""",
    )
    assert kinds(answer.plan) == ["Alloc", "Free", "Alloc"]


def test_the_same_source_gives_the_same_bytes(tracer):  # noqa: F811
    body = DOUBLE + (
        "def f(x):\n    y = torch.empty_like(x)\n    double[(8,)](x, y, x.numel(), BLOCK=256)\n"
        "    return y\n"
    )
    plans = [dump_plan(trace(tracer, prefix + body).plan) for prefix in ("", "", "# one\n# two\n")]
    assert plans[0] == plans[1] == plans[2]  # moved down two lines, it is the same machine code


def test_order_of_fills_copies_and_launches_is_kept(tracer):  # noqa: F811
    answer = trace(
        tracer,
        DOUBLE
        + """
def f(x):
    y = torch.zeros_like(x)
    double[(1,)](x, y, 10, BLOCK=16)
    y[:, 1:3] = x[:, :2]
    y[3].fill_(7)
    double[(1,)](x, y, 10, BLOCK=16)
    return y
""",
    )
    assert kinds(answer.plan) == ["Alloc", "Fill", "Launch", "Copy", "Fill", "Launch"]
    copy, fill = answer.plan.ops[3], answer.plan.ops[4]
    assert isinstance(copy, Copy)
    assert (copy.dst.offset, copy.dst.shape, copy.dst.strides) == (1, (64, 2), (32, 1))
    assert isinstance(fill, Fill)
    assert (fill.tensor.offset, fill.tensor.shape, fill.value) == (96, (32,), 7)


def test_out_of_the_wrong_shape_is_refused(tracer):  # noqa: F811
    answer = trace(
        tracer,
        "def f(x):\n    y = torch.empty(1, device=x.device)\n    torch.mm(x, x.t(), out=y)\n"
        "    return y\n",
        allow=["aten::mm"],
    )
    assert answer.status == "POLICY"
    assert "line 4" in answer.message
    assert "out=" in answer.message


def test_an_allowed_operation_does_not_allow_its_neighbours(tracer):  # noqa: F811
    answer = trace(tracer, "def f(x):\n    return x + torch.mm(x, x)\n", allow=["aten::mm"],
                   arguments=[tensor("x", (8, 8))], results=[tensor("y", (8, 8))])  # fmt: skip
    assert answer.status == "POLICY"
    assert "'add'" in answer.message
    assert "aten::mm" in answer.message


@pytest.mark.parametrize(
    ("prune", "expected"),
    [
        ("lambda configs, args, **kw: configs", [128, 256, 512]),
        ("lambda configs, args, **kw: configs[1:]", [256, 256, 512]),  # the default falls back
        ("lambda configs, args, **kw: configs[:2]", [128, 256, None]),  # pruned here: dropped
    ],
)
def test_autotuned_configurations_one_at_a_time(tracer, prune, expected):  # noqa: F811
    body = (
        "configs = [triton.Config({'BLOCK': b}) for b in (128, 256, 512)]\n"
        f"prune = {prune}\n"
        "@triton.autotune(configs, key=['n'], prune_configs_by={'early_config_prune': prune})"
        + DOUBLE
        + """
def f(x):
    y = torch.empty_like(x)
    double[lambda m: (triton.cdiv(x.numel(), m['BLOCK']),)](x, y, x.numel())
    return y
"""
    )
    for index, block in enumerate(expected):
        answer = trace(tracer, body, config=index)
        assert answer.configs == 3
        if block is None:
            assert answer.status == "RESOURCE_LIMIT"
            assert "prune_configs_by" in answer.message
        else:
            assert answer.plan.launches[0].grid == (2048 // block, 1, 1)


def test_the_declared_configuration_comes_first_and_neighbours_next(tracer):  # noqa: F811
    body = (
        "TUNE = {'A': [1, 2, 3], 'B': [10, 20]}\nA = 2\nB = tl.constexpr(20)\n"
        "def f(x):\n    y = torch.empty_like(x)\n    y.fill_(A + B.value)\n    return y\n"
    )
    answers = [trace(tracer, body, config=i) for i in range(6)]
    configs = [(a.config["A"], a.config["B"]) for a in answers]
    assert configs == [(2, 20), (1, 20), (3, 20), (2, 10), (1, 10), (3, 10)]
    assert [a.plan.ops[1].value for a in answers] == [a + b for a, b in configs]


def test_a_slow_compile_is_cut_and_names_the_kernel(tracer):  # noqa: F811
    body = DOUBLE.replace("* 2", "* 3") + (
        "def f(x):\n    y = torch.empty_like(x)\n    double[(8,)](x, y, x.numel(), BLOCK=256)\n"
        "    return y\n"
    )
    answer = trace(tracer, body, compile_limit_s=0.001)
    assert answer.status == "TIMEOUT"
    assert "kernel double" in answer.message
    assert "smaller tiles" in answer.message


@pytest.mark.nightly
def test_a_thousand_buffers_are_enough(tracer):  # noqa: F811
    body = (
        "def f(x):\n    many = [torch.empty(1, device=x.device) for _ in range(%d)]\n"
        "    return torch.empty_like(x)\n"
    )
    answer = trace(tracer, body % 999)
    assert answer.status == "RESOURCE_LIMIT"
    assert "allocation number 1000 of 8192 bytes: at most 1000 buffers" in answer.message
    assert len(trace(tracer, body % 998).plan.buffers) == 1000


def test_a_grid_over_the_limit_of_its_axis(tracer):  # noqa: F811
    body = DOUBLE + (
        "def f(x):\n    y = torch.empty_like(x)\n    double[(1, 70000)](x, y, 8, BLOCK=16)\n"
        "    return y\n"
    )
    answer = trace(tracer, body)
    assert answer.status == "RESOURCE_LIMIT"
    assert "line 9" in answer.message


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_every_target_compiles_without_a_gpu(tracer, target):  # noqa: F811
    body = DOUBLE + (
        "def f(x):\n    y = torch.empty_like(x)\n"
        "    major, minor = torch.cuda.get_device_capability()\n"
        "    double[(major, minor + 1)](x, y, x.numel(), BLOCK=256)\n    return y\n"
    )
    plan = trace(tracer, body, target=target).plan
    launch = plan.launches[0]
    capability = int(target.removeprefix("sm_").rstrip("a"))
    assert launch.grid[:2] == (capability // 10, capability % 10 + 1)
    assert plan.target == target
    assert plan.kernels[0].registers > 0
    assert plan.kernels[0].load_bytes


def test_launches_keep_the_registered_state_of_views(tracer):  # noqa: F811
    answer = trace(
        tracer,
        DOUBLE + "def f(x):\n    y = torch.empty_like(x)\n"
        "    double[(1,)](x[1], y[2, 4:], 8, BLOCK=16)\n    return y\n",
    )
    launch = answer.plan.launches[0]
    assert isinstance(launch, Launch)
    assert [(a.buffer, a.offset) for a in launch.args[:2]] == [(0, 128), (1, (64 + 4) * 4)]


def test_a_host_error_names_the_innermost_line_of_the_candidate(tracer):  # noqa: F811
    answer = trace(tracer, "def g(x):\n    return x.view(7, 7)\n\ndef f(x):\n    return g(x)\n")
    assert (answer.stage, answer.status) == ("build", "RUNTIME_ERROR")
    assert answer.message.startswith("line 3: `return x.view(7, 7)`: RuntimeError: ")


def test_an_exit_is_a_rejection(tracer):  # noqa: F811
    answer = trace(tracer, "import sys\ndef f(x):\n    sys.exit(3)\n")
    assert answer.status == "RUNTIME_ERROR"
    assert "SystemExit" in answer.message


@pytest.mark.parametrize("make", ["empty_like(x)", "zeros_like(x)", "full_like(x, 2.0)"])
@pytest.mark.parametrize(("rows", "strides"), [(1, (25, 1)), (3, (17, 1))])
def test_a_tensor_like_a_padded_one_has_the_strides_that_torch_gives_it(
    tracer,  # noqa: F811
    make,
    rows,
    strides,
):
    """One padded row is dense to torch, and keeps its stride; on `meta` torch drops it."""
    body = f"def f(x):\n    y = torch.{make}\n    y.fill_(y.stride(0))\n    return y\n"
    x = replace(tensor("x", (rows, 17)), strides=(25, 1))
    answer = trace(tracer, body, [x], [tensor("y", (rows, 17))])
    real = torch.empty(100).as_strided((rows, 17), (25, 1))
    assert torch.empty_like(real).stride() == strides
    assert answer.plan.outputs[0].strides == strides
    assert answer.plan.ops[-1].value == strides[0]


@pytest.mark.parametrize(("dtype", "last"), [("float32", True), ("float64", False)])
def test_a_convolution_has_channels_last_where_an_operand_has(dtype, last):
    x = torch.empty(2, 3, 5, 4, dtype=getattr(torch, dtype), device="meta")
    weight = torch.empty(4, 3, 3, 3, dtype=x.dtype, device="meta")
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    plain, given = (
        run_on_meta(torch.ops.aten.convolution.default, (t, weight, *rest), {})
        for t in (x, x.to(memory_format=torch.channels_last))
    )
    assert plain.is_contiguous()
    assert given.is_contiguous(memory_format=torch.channels_last) == last
