"""Tasks made of PyTorch code: everything but the check's own process is real."""

import math
import re

import kagent
import pytest
import sympy
import torch
from kagent.authoring import new_task
from kagent.authoring.draft import trial
from kagent.authoring.draft.draft import DraftCase, DraftKind, TaskDraft
from kagent.authoring.draft.inputs import draw_example
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.draft.toml import task_toml
from kagent.authoring.draft.trial import Trials
from kagent.authoring.errors import AuthoringError
from kagent.authoring.importers.kernelbench import read_problem
from kagent.authoring.importers.kernelbench_files import problem_files
from kagent.authoring.new_task import find_room, make_draft, make_task, parse_vary
from kagent.authoring.tracing import trace as trace_module
from kagent.authoring.tracing.drawing import observed, recorded
from kagent.authoring.tracing.operation import make_operation
from kagent.authoring.tracing.sizes import Room
from kagent.authoring.tracing.trace import trace
from kagent.cli.new import made_text
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.formula import evaluate
from kagent_sandbox.data.task import load_task
from kagent_sandbox.errors import UserError
from kagent_sandbox.judge.check import task_checker
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode


class RMSNorm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, dim=64, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


BIG = torch.arange(999.0).sin()
PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, channels, kernel):
        super().__init__()
        self.conv = nn.Conv2d(channels, 16, kernel)
        norm = self.norm = nn.BatchNorm2d(16)
        self.after = lambda y: torch.relu(norm(y))

    def forward(self, x, sign):
        return self.after(self.conv(x)) * sign

def get_inputs():
    return [torch.rand(32, 8, 40, 24), torch.randint(0, 2, (32, 1, 1, 1)).float() * 2 - 1]

def get_init_inputs():
    return [8, 3]
"""


def every_axis(operation):
    return [(i, d) for i, e in enumerate(operation.examples) for d in range(len(e.shape))]


def traced(function, *inputs, **options):
    operation = make_operation(function, inputs, **options)
    return trace(operation, every_axis(operation))


def written(found):
    return reference_py(TaskDraft(found, DraftKind((), ()), DraftKind((), ())))


@pytest.fixture
def in_process(monkeypatch):
    def check(task, *, say):
        return [task_checker.check(task, kind, torch.device("cpu")) for kind in ("gpu", "cpu")]

    monkeypatch.setattr(new_task, "check_kinds", check)


def test_a_module_becomes_a_sound_task(tmp_path, in_process):
    operation = make_operation(RMSNorm, torch.randn(96, 64))
    made = make_task(operation, tmp_path / "t", seeds=False)
    task = load_task(tmp_path / "t")
    assert made.holes == ()
    assert task.signature == "rms_norm(x: Tensor[M, N], weight: Tensor[N]) -> Tensor[M, N]"
    assert task.bytes == "(2 * M * N + N) * itemsize"
    assert task.gpu.bench[0].dims == {"M": 96, "N": 64}
    sizes = {tuple(c.dims.values()) for c in task.cpu.check}
    assert any(1 in s for s in sizes)
    assert {c.inputs for c in task.cpu.check} >= {"normal", "mixed", "spiked"}
    with pytest.raises(UserError, match="it is there already"):
        make_task(operation, tmp_path / "t")


def upper_product(a, b):
    return torch.triu(a @ b)


def upper_inputs():
    return torch.triu(torch.rand(64, 64)), torch.triu(torch.rand(64, 64))


def test_what_algebra_shows_to_be_idle_is_declared(tmp_path, in_process):
    """`triu` of a product of matrices that the example draws upper triangular."""
    made = make_task(make_operation(upper_product, upper_inputs), tmp_path / "t", seeds=False)
    assert made.holes == ()
    (idle,) = made.task.without_effect
    assert "without its triu (its self instead)" in idle.operation
    assert "upper triangular" in idle.reason
    assert all(idle.operation in "".join(c.without_effect) for c in made.checks)


def gated_norm(x, z):
    y = x * F.silu(z)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


def test_what_accumulates_has_room_for_a_tree_of_roundings():
    """torch on the CPU accumulates in float64, and errs by one rounding at any length."""
    draft = make_draft(find_room(make_operation(lambda x: x.cumprod(1), torch.rand(64, 1024))))
    assert draft.trace.scanned(draft.trace.dims) == 1024
    assert draft.floor == 8.0  # a quarter of the root


def test_infinities_are_no_inputs_where_a_number_that_vanishes_decides(in_process):
    """An infinity times what is 0 in float32 alone: torch gives NaN where the reference gives 0,
    but only at some draws of a large scale.
    """
    draft = make_draft(find_room(make_operation(gated_norm, (torch.randn(96, 64),) * 2)))
    assert not draft.nonfinite
    assert not any("nonfinite" in g.fields["inputs"] for g in draft.cpu.hidden_check)


def norm_by_groups(x, z, weight):
    y = (x * F.silu(z)).view(x.shape[0], 8, -1)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).flatten(1) * weight


def test_infinities_that_hardly_ever_meet_what_vanishes_are_no_inputs(in_process):
    """In few draws as cases have them, no infinity of `x` meets a `z` below -88."""
    torch.manual_seed(0)
    given = torch.randn(2048, 512), torch.randn(2048, 512), torch.randn(512) * 0.1 + 1
    assert not make_draft(find_room(make_operation(norm_by_groups, given))).nonfinite
    for function in (F.silu, lambda x: x.softmax(-1)):
        assert make_draft(find_room(make_operation(function, torch.randn(64, 64)))).nonfinite


def test_infinities_are_no_inputs_where_torchs_own_formula_decides():
    """A layer norm's gradient at an infinity: its kernel for CPUs gives NaN where the simpler
    operations that Inductor has for it, and its kernel for GPUs, keep infinities. Forward it is NaN
    either way.
    """
    for backward in (True, False):
        operation = make_operation(nn.LayerNorm(64), torch.randn(48, 64), backward=backward)
        assert make_draft(find_room(operation)).nonfinite is not backward


class Shifted(nn.Module):
    """Divides by a norm that only a module of zeros has as 0."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(64))

    def forward(self, x):
        return F.normalize(x + self.shift, dim=-1)


def test_a_limit_that_needs_a_module_of_zeros_is_no_hole(tmp_path, in_process):
    made = make_task(make_operation(Shifted(), torch.randn(96, 64)), tmp_path / "t", seeds=False)
    assert made.holes == ()
    assert {c.inputs for kind in (made.task.cpu, made.task.gpu) for c in kind.check} >= {"blank"}
    text = (tmp_path / "t/reference.py").read_text()
    assert "`blank`: all floating-point numbers are 0" in text


class Deep(nn.Module):
    """Normalises each channel again and again: over two elements, that amplifies rounding."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(part for _ in range(6) for part in (nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU()))
        )

    def forward(self, x):
        return self.layers(F.avg_pool2d(x, 16))


def test_what_amplifies_rounding_at_small_sizes_begins_at_larger_ones():
    torch.manual_seed(0)
    room = find_room(make_operation(Deep, torch.randn(64, 8, 32, 32)))
    draft = make_draft(room)
    cases = [c.sizes for kind in (draft.cpu, draft.gpu) for c in (*kind.check, *kind.bench)]
    assert min(math.prod(s.values()) for s in cases) > math.prod(room.least.values())


@pytest.mark.parametrize(
    ("function", "sizes", "why"),
    [
        (lambda x: (x + 1e6) - 1e6, "M = 256, N = 64; M = 1024, N = 64", "torch errs by"),
        (lambda x: x - x, "M = 256, N = 64", "is 0 everywhere"),
    ],
)
def test_a_refusal_names_the_sizes_which_grow_only_where_rounding_is_amplified(
    function, sizes, why
):
    room = find_room(make_operation(function, torch.randn(1024, 64)))
    with pytest.raises(AuthoringError, match=rf"^its example cannot be a case of {sizes}: .*{why}"):
        make_draft(room)


def test_shapes_are_formulas_and_equalities_are_kept():
    found = traced(F.linear, torch.randn(16, 32), torch.randn(32, 32), torch.randn(32))
    assert found.dims == {"M": 16, "K": 32, "N": 32}
    assert found.shapes == (("M", "K"), ("N", "K"), ("N",))
    assert found.results[0].shape == ("M", "N")
    assert found.products == "2 * K * M * N"
    pooled = traced(lambda x: F.avg_pool1d(x, 3, 2, 1), torch.randn(4, 8, 31))
    assert pooled.results[0].shape == ("B", "C", "((L - 1) // 2) + 1")


def test_ratios_stay_and_what_cannot_vary_is_fixed():
    heads = make_operation(lambda x: x.view(x.shape[0], -1, 16).softmax(-1), torch.randn(24, 64))
    room = find_room(heads)
    assert isinstance(room, Room)
    assert room.steps == {"M": 1, "N": 16}
    norm = make_operation(lambda x: F.layer_norm(x, (64,)), torch.randn(24, 64))
    assert find_room(norm).trace.shapes == (("M", 64),)
    named = find_room(norm, {("x", 0): "tokens"})
    assert named.trace.dims == {"tokens": 24}
    with pytest.raises(AuthoringError, match="takes no other sizes"):
        find_room(make_operation(lambda x: x.view(4, 8), torch.randn(4, 8)), {("x", 0): "B"})


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("layer", "name"), [(nn.GRU, "gru"), (nn.LSTM, "lstm")])
def test_a_recurrent_layer_is_one_operation_of_any_number_of_steps(layer, name, batch_first):
    torch.manual_seed(0)
    module = layer(8, 16, num_layers=2, bidirectional=True, batch_first=batch_first)
    room = find_room(make_operation(module, torch.randn(12, 10, 8)))
    found = room.trace
    called = [n.target for n in found.graph.graph.nodes if n.op == "call_function"]
    assert called.count(getattr(torch.ops.aten, name).input) == 1
    assert found.dims == {"B": 12, "M": 10}
    assert room.steps == room.least == {"B": 1, "M": 1}
    batch = "B" if batch_first else "M"
    results = [("B", "M", 32), *((4, batch, 16),) * (2 if name == "lstm" else 1)]
    assert [r.shape for r in found.results] == results
    with FlopCounterMode(display=False) as counter, torch.backends.mkldnn.flags(enabled=False):
        module(torch.randn(3, 5, 8))  # of a library's own LSTM nothing is counted
    assert evaluate(found.products, {"B": 3, "M": 5}) == counter.get_total_flops()


def test_tensors_of_a_list_have_equal_dimensions_where_their_shapes_are_equal():
    def stacked(x, caches):
        return [x + c.sum(0) for c in caches]

    caches = [torch.randn(40, 16), torch.randn(40, 16), torch.randn(24, 16)]
    found = find_room(make_operation(stacked, (torch.randn(16), caches))).trace
    assert found.shapes == (("N",), ("M", "N"), ("M", "N"), ("K", "N"))


def test_rounding_may_add_up_along_a_chain_of_operations(monkeypatch):
    def chain(x):
        for _ in range(100):
            x = x * 1.01
        return x

    def tried(function):
        room = find_room(make_operation(function, torch.randn(64, 32)))
        assert room.trace.longest_chain == (100 if function is chain else 1)
        case = DraftCase(room.trace.dims, "float32")
        kind = DraftKind((case,), (case,))
        draft = TaskDraft(room.trace, kind, kind)
        with trial.written(draft) as folder:
            return Trials(draft, folder).case(case, "trial").why

    monkeypatch.setattr(trial, "MOST_EAGER", 1e-3)  # of a few operations
    monkeypatch.setattr(trial, "CHAIN_EAGER", 0.15)
    assert tried(chain) == ""
    assert re.search(r"torch errs by 0\.\d+ epsilons", tried(torch.exp2)) is not None


def test_a_long_formula_of_costs_is_near_at_small_sizes_too():
    b, h, w = sympy.symbols("B H W", integer=True, positive=True)
    cost = b * sum(8**k * ((h - 1) // 2**k + 1) * ((w - 1) // 2**k + 1) for k in range(9))
    dims = {"B": 16, "H": 256, "W": 128}
    short = trace_module._cost(cost, dims)
    assert len(short) < len(str(cost))
    for sizes, off in (
        ((16, 256, 128), 1e-4),
        ((1, 1, 1), 1e-4),
        ((2, 2, 2), 0.1),
        ((4, 64, 32), 0.25),
    ):
        exact = float(cost.subs(dict(zip((b, h, w), sizes, strict=True))))
        assert evaluate(short, dict(zip(dims, sizes, strict=True))) == pytest.approx(exact, rel=off)


class Wide(nn.Module):
    """Has far more weights than a case has elements."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(13)))

    def forward(self, x):
        return x + self.layers(x.cumsum(1))


def test_cases_of_many_weights_have_more_than_one_of_all_else():
    draft = make_draft(find_room(make_operation(Wide(), torch.randn(64, 32, 512))))
    for kind in (draft.cpu, draft.gpu):
        assert max(min(c.sizes.values()) for c in kind.check) > 1
    assert min(draft.cpu.bench[0].sizes.values()) > 1


@pytest.mark.parametrize(("most_s", "own"), [(1e9, True), (0.0, False)])
def test_the_examples_own_sizes_are_a_benchmark_case_where_time_allows(monkeypatch, most_s, own):
    monkeypatch.setattr(new_task, "BENCH_S", 0.0)  # so that the case is scaled down
    monkeypatch.setattr(new_task, "MOST_BENCH_S", most_s)
    draft = make_draft(find_room(make_operation(lambda x: x.cumsum(1), torch.rand(8192, 512))))
    whole = {"M": 8192, "N": 512}
    assert (draft.cpu.bench[0].sizes == whole) == own
    assert draft.cpu.bench[-1].sizes["M"] < 8192
    assert len(draft.cpu.bench) == 1 + own
    assert ("Its own are no case: torch would take about" in draft.cpu.bench_words) != own
    assert f"# {draft.cpu.bench_words}" in task_toml(draft).splitlines()


def norm_backward(grad, x, mean, rstd, weight, bias, other):
    found = torch.ops.aten.native_layer_norm_backward.default(
        grad, x, grad.shape[-1:], mean, rstd, weight, bias, [True, True, True]
    )
    return found[1], found[2], other + found[0]


def test_sizes_that_only_real_tensors_compare_are_one_dimension():
    """The gradient of a layer norm: on tensors without memory torch takes weights of any length."""
    wide = [torch.randn(4, 16, 64) for _ in range(3)]
    of_rows, of_columns = [torch.rand(4, 16, 1) for _ in range(2)], [torch.rand(64)] * 2
    inputs = (*wide[:2], *of_rows, *of_columns, wide[2])
    room = find_room(make_operation(norm_backward, inputs))
    weight, bias = room.trace.shapes[4:6]
    assert weight == bias == room.trace.shapes[0][-1:]
    assert len(room.trace.dims) == 2
    assert room.trace.dims[weight[0]] == 64
    assert room.trace.works({n: 2 * s for n, s in room.trace.dims.items()})


def test_equal_sizes_that_nothing_ties_stay_apart():
    room = find_room(make_operation(lambda x, y: x.relu() @ y, (torch.rand(32, 32),) * 2))
    assert len(room.trace.dims) == 3


def test_hidden_cases_of_all_costs_are_drawn_from_the_least():
    def layers(x, a, b, c):
        return F.relu(F.relu(x @ a) @ b) @ c

    sizes = [(64, 512), (512, 1024), (1024, 2048), (2048, 512)]
    given = tuple(torch.randn(s) / s[0] ** 0.5 for s in sizes)
    draft = make_draft(find_room(make_operation(layers, given)))
    small, usual = draft.gpu.hidden_check
    assert 1 < small.least < 1e4 < small.most == usual.least < usual.most
    assert small.count == len(small.dims) == 5


def test_a_size_that_is_fixed_beside_others_may_vary_alone():
    def causal(x, weight):
        padded = F.pad(x, (3, 0))
        return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=x.shape[1]))

    room = find_room(make_operation(causal, (torch.randn(2, 16, 32), torch.randn(16, 4))))
    assert room.trace.dims == {"L": 32}
    fixed = find_room(make_operation(lambda x: x.view(4, 8), torch.randn(4, 8)))
    assert fixed.trace.dims == {}


def test_the_reference_is_in_float64_also_where_the_code_names_a_dtype():
    def mixed(x):
        h = x.float()
        return (h * torch.ones(x.shape[-1])).to(torch.bfloat16)

    text = written(traced(mixed, torch.randn(8, 16, dtype=torch.bfloat16)))
    space = {}
    exec(text, space)
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    assert space["reference"](x=x).dtype == torch.float64
    assert torch.equal(space["eager"](x=x), mixed(x))


def test_a_gradient_is_a_task():
    operation = make_operation(RMSNorm(16), torch.randn(8, 16), backward=True)
    found = trace(operation, every_axis(operation))
    assert [e.name for e in operation.examples] == ["grad", "x", "weight"]
    assert [r.name for r in found.results] == ["dx", "dweight"]
    space = {}
    exec(written(found), space)
    tensors = [torch.randn(8, 16), torch.randn(8, 16), torch.randn(16)]
    named = dict(zip(["grad", "x", "weight"], tensors, strict=True))
    for mine, its in zip(space["eager"](**named), operation.call(*tensors), strict=True):
        assert torch.allclose(mine, its)


def rule(function, x):
    """The `accept` that a task of the function gets; None if it gets none."""
    found = traced(function, x)
    draft = TaskDraft(found, DraftKind((), ()), DraftKind((), ()))
    space = {}
    exec(reference_py(draft), space)
    assert ("accept = true" in task_toml(draft)) == ("accept" in space)
    return space.get("accept")


def test_an_index_of_an_equal_value_is_as_right_and_no_other():
    def route(x):
        weights, experts = x.softmax(-1).topk(2)
        return weights / weights.sum(-1, keepdim=True), experts.int()

    x = torch.linspace(0, 1, 16).repeat(8, 1)
    x[:, 3] = x[:, 9] = 2.0
    x[:, 5] = 2.0 + 1e-7  # float32 rounds it to 2
    accept = rule(route, x)
    right = [(3, 9), (9, 3), (5, 9)]
    wrong = [(3, 3), (3, 15), (16, 3), (-1, 3), (1 << 30, 3)]
    given = torch.tensor([*right, *wrong], dtype=torch.int32)
    expected = torch.tensor([[5, 3]]).expand(8, 2)
    weights, experts = accept((None, given), (None, expected), x=x)
    assert weights is False
    assert experts.all(-1).tolist() == [True] * len(right) + [False] * len(wrong)


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.argmax(), ()),
        (lambda x: x.argmin(0), (16,)),
        (lambda x: x.max(-1, keepdim=True)[1], (8, 1)),
        (lambda x: x.sort(0)[1], (8, 16)),
        (lambda x: x.argsort(-1, descending=True)[:, :3], (8, 3)),
    ],
)
def test_every_choice_of_elements_gets_the_rule(function, shape):
    x = torch.randn(8, 16)
    index = function(x)
    assert index.shape == shape
    accept = rule(function, x)
    assert accept((index,), (index,), x=x)[0].all()
    assert not accept((index + 1,), (index,), x=x)[0].all()
    every = torch.full_like(x, torch.nan)
    assert accept((index,), (index,), x=every)[0].all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.relu(),
        lambda x: x.topk(2)[0],
        lambda x: x.topk(2)[1][:4],  # rows are left out: of which values would not be known
        lambda x: x.long().sort(stable=True)[1],  # torch fixes it
    ],
)
def test_what_torch_fixes_gets_no_rule(function):
    assert rule(function, torch.randn(8, 16)) is None


@pytest.mark.parametrize(
    ("function", "near", "steps"),
    [
        (lambda x: (x / 0.1).round().clamp(-127, 127).to(torch.int8), 0.45, (1, -1)),
        (lambda x: (x / 0.1).floor().int(), 0.3, (-1, 1)),
        (lambda x: (x / 0.1).ceil().int(), 0.3, (-1, 1)),
        (lambda x: (x / 0.1).long(), 0.3, (-1, 1)),
    ],
    ids=["nearest", "down", "up", "cut off"],
)
def test_near_a_tie_the_number_beyond_it_is_as_right_and_no_other(function, near, steps):
    """In float64, 0.45 and 0.3 of float32 are a little off 4.5 and 3 tenths."""
    x = torch.tensor([near, 0.37, -near]).repeat(4, 1)
    accept = rule(function, x)
    expected = function(x.double())
    right = torch.tensor([steps[0], 0, steps[1]])
    for wrong, mask in ((0, [True] * 3), (1, [False, False, False]), (-2, [False] * 3)):
        (found,) = accept((expected + right + wrong * right.sign() + wrong * (right == 0),),
                          (expected,), x=x)  # fmt: skip
        assert found.tolist() == [mask] * 4
    assert not accept((expected - right,), (expected,), x=x)[0][:, [0, 2]].any()


def test_whole_numbers_that_no_rounding_decides_get_no_rule():
    x = torch.randn(8, 16)
    assert rule(lambda x: (x.round() * 2).int(), x) is None
    assert rule(lambda x: (x > 0).sum(-1), x) is None


def test_numbers_are_arguments_and_unneeded_tensors_are_not():
    operation = make_operation(
        lambda x, unused, eps: x + eps,
        {"x": torch.randn(8, 9), "unused": torch.randn(50, 60), "eps": 0.5},
    )
    found = trace(operation, every_axis(operation))
    assert found.used == (0,)
    text = task_toml(TaskDraft(found, DraftKind((), ()), DraftKind((), ())))
    assert 'name = "eps"\nvalue = 0.5' in text
    assert "unused" not in text


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x + torch.rand_like(x), "draws random numbers"),
        (lambda x: x[: int(x.sum())], "depends on a tensor's values"),
        (lambda x: None, "returns no tensor, and writes none of its arguments"),
        (lambda x: x + BIG[:16], "holds a tensor"),
    ],
)
def test_what_cannot_be_a_task_is_said(function, expected):
    with pytest.raises(AuthoringError, match=expected):
        written(traced(function, torch.randn(8, 16)))


def step(p, grad, m, momentum=0.9):
    """Momentum, in place."""
    m.mul_(momentum).add_(grad)
    p[:, 1:].sub_(m[:, 1:], alpha=0.1)
    return m.norm(), p


def test_arguments_that_are_written_are_found(tmp_path, in_process):
    inputs = (*torch.randn(3, 96, 64).unbind(), 0.5)
    made = make_task(make_operation(step, inputs), tmp_path / "t", seeds=False)
    task = made.task
    assert made.holes == ()
    assert [r.name for r in task.compared] == ["y", "p", "m"]
    assert task.mutates == ("p", "m")
    assert task.bytes == "(5 * M * N + 1) * itemsize"
    p, grad, m = torch.randn(3, 8, 16).double().unbind()
    expected = [p.clone(), grad, m.clone()]
    norm, _ = step(*expected, momentum=0.5)
    found = task.reference().reference(p=p, grad=grad, m=m, momentum=0.5)
    assert all(map(torch.allclose, found, (norm, expected[0], expected[2])))
    assert not torch.equal(p, expected[0]), "the reference works on copies"
    assert "3 times torch's error" in made_text(made).plain


def test_a_task_from_python(tmp_path, in_process, monkeypatch):
    monkeypatch.setattr(new_task, "write_seeds", lambda *_, **__: [])
    made = kagent.Task.of(
        lambda x: 30 * torch.tanh(x / 30),
        torch.randn(48, 64),
        vary={"x:0": "tokens"},
        to=tmp_path / "cap",
        name="soft_cap",
    )
    assert made.signature == "soft_cap(x: Tensor[tokens, 64]) -> Tensor[tokens, 64]"
    assert (made.dims, made.holes) == ({"tokens": 48}, ())
    assert load_task(made.folder).name == "soft_cap"


def test_a_copy_that_is_written_stays_a_copy():
    def function(x):
        y = x * 1
        return y.add_(x)

    found = traced(function, torch.randn(8, 16))
    assert found.written == ()
    space = {}
    exec(written(found), space)
    x = torch.ones(4, 4)
    assert (space["eager"](x=x) == 2).all()
    assert (x == 1).all()


def test_bad_input_is_said():
    with pytest.raises(UserError, match="cannot be made without arguments"):
        make_operation(nn.Linear, torch.randn(4, 4))
    with pytest.raises(UserError, match="missing a required argument"):
        make_operation(lambda x, y: x, (torch.randn(4),))
    with pytest.raises(UserError, match="expected ARG:DIM=NAME"):
        parse_vary(["x=B"])
    operation = make_operation(torch.tanh, (torch.randn(4, 1),))
    with pytest.raises(UserError, match="no tensor of that name"):
        find_room(operation, {("y", 0): "B"})


def test_drawings_are_read_from_values_and_from_code():
    def words(tensor, **options):
        return observed(tensor, **options).drawing.words()

    assert words(torch.arange(4000).reshape(40, 100) % 7) == "whole numbers from 0 to 6"
    assert words(torch.ones(40, 40).tril()) == "1 in the lower triangle, 0 elsewhere"
    assert words(torch.zeros(8), parameter=True) == "evenly from -0.1 to 0.1"
    generator = torch.Generator().manual_seed(0)
    assert words(torch.randn(9999, generator=generator)).startswith("normal with mean 0 ")
    flags = recorded(lambda: ((torch.rand(8, 9) < 0.1).float(), torch.rand(8, 9) * 2))
    assert [f.drawing.flags for f in flags] == [True, False]
    huge = recorded(lambda: torch.rand(1 << 20, 1 << 20))  # 4 TiB
    assert huge.drawing.words() == "evenly from 0 to 1"


def test_a_kernelbench_problem_is_an_operation(tmp_path):
    file = tmp_path / "7_Conv2d_BatchNorm_ReLU_.py"
    file.write_text(PROBLEM)
    (tmp_path / "other.py").write_text("x = 1\n")
    assert problem_files([tmp_path]) == [file]
    operation = read_problem(file)
    assert operation.name == "conv2d_batch_norm_re_lu"
    assert any("running statistics" in n for n in operation.notes)
    found = trace(operation, [(0, 0), (0, 2), (0, 3), (1, 0)])
    assert found.shapes[:3] == (("B", 8, "H", "W"), ("B", 1, 1, 1), (16, 8, 3, 3))
    assert found.results[0].shape == ("B", 16, "H - 2", "W - 2")
    text = written(found)
    space = {}
    exec(text, space)
    case = Case(name="c", dtype="float32", B=5, H=9, W=7)
    drawn = space["inputs"](case, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert list(drawn)[:3] == ["x", "sign", "conv_weight"]
    assert set(drawn["sign"].unique().tolist()) == {-1.0, 1.0}
    assert torch.allclose(space["eager"](**drawn), operation.call(*drawn.values()), atol=1e-5)


def test_code_that_counts_elements_draws_other_sizes_and_else_its_values_are_drawn():
    def example():
        angles = torch.arange(64)[:, None] * 100 ** -(torch.arange(32) / 32)
        return torch.randn(64, 32), angles.cos(), torch.arange(8).repeat(8).float()

    operation = make_operation(lambda x, c, d: x * c + d[:, None], example)
    room = find_room(operation)
    names = dict(zip(room.trace.dims, (16, 8), strict=True))
    draft = TaskDraft(room.trace, DraftKind((), ()), DraftKind((), ()))
    assert [tuple(draw_example(draft, i, names).shape) for i in range(3)] == [
        (16, 8),
        (16, 8),
        (16,),
    ]
    kinds = [e.drawing.words() for e in room.trace.operation.examples]
    assert kinds[1:] == ["as the example's own code draws it", "evenly from 0 to 7"]


def test_equal_sizes_of_what_was_recorded_are_told_apart():
    operation = make_operation(torch.tanh, lambda: torch.randn(16, 16) * 16 + torch.rand(16, 1))
    found = trace(operation, every_axis(operation))
    space = {}
    exec(written(found), space)
    case = Case(name="c", dtype="float32", M=5, N=9)
    drawn = space["inputs"](case, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert next(iter(drawn.values())).shape == (5, 9)


def test_what_reduces_one_element_is_left_out():
    found = traced(
        lambda x: (x.sum(1, True).max(1, True)[0] ** 1 + 0).logsumexp(1, True), torch.randn(8, 9)
    )
    assert found.notes == tuple(
        f"aten.{name} over one element is left out" for name in ("max", "logsumexp")
    )
    assert not any(name in written(found) for name in ("max", "pow", "add", "logsumexp"))
