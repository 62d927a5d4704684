"""What rounding and infinities may be in the cases of a task made of PyTorch code."""

import math
import re
import time

import pytest
import torch
from kagent.authoring import new_task
from kagent.authoring.draft import trial
from kagent.authoring.draft.cases import make_draft
from kagent.authoring.draft.draft import DraftCase, DraftKind, TaskDraft
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.draft.rooms import find_rooms
from kagent.authoring.draft.toml import task_toml
from kagent.authoring.draft.trial import Trials
from kagent.authoring.errors import AuthoringError
from kagent.authoring.new_task import make_task
from kagent.authoring.tracing.operation import make_operation
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.task import draw_hidden, load_task
from kagent_sandbox.device.traits import InputPolicy
from kagent_sandbox.judge.check import numerics
from kagent_sandbox.judge.check.inputs import InputSampler
from torch import nn
from torch.nn import functional as F


def gated_norm(x, z):
    y = x * F.silu(z)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)


def test_what_accumulates_has_room_for_a_tree_of_roundings():
    """torch on the CPU accumulates in float64, and errs by one rounding at any length."""
    draft = make_draft(
        next(find_rooms(make_operation(lambda x: x.cumprod(1), torch.rand(64, 1024))))
    )
    assert draft.trace.scanned(draft.trace.dims) == 1024
    assert draft.floor == 8.0  # a quarter of the root


@pytest.mark.nightly
def test_infinities_are_no_inputs_where_a_number_that_vanishes_decides(in_process):
    """An infinity times what is 0 in float32 alone: torch gives NaN where the reference gives 0,
    but only at some draws of a large scale.
    """
    draft = make_draft(next(find_rooms(make_operation(gated_norm, (torch.randn(96, 64),) * 2))))
    assert not draft.nonfinite
    assert not any("nonfinite" in g.fields["inputs"] for g in draft.cpu.hidden_check)


def vanishing(x, weight):
    """Most of it is near 0 where the convolution is far below."""
    return F.mish(F.mish(F.conv2d(x, weight)))


@pytest.mark.nightly
def test_torch_in_tf32_is_a_yardstick_in_all_cases_of_a_convolution(tmp_path):
    """It was wrong by 8 times a row of two numbers, and no kernel could be right there."""
    given = torch.randn(16, 16, 24, 24), torch.randn(16, 16, 3, 3) / 12
    folder = make_task(make_operation(vanishing, given), tmp_path / "v", seeds=False).folder
    task = load_task(folder)
    assert [r.row_dims for r in task.results] == [3]
    sampler = InputSampler(task, torch.device("cpu"), InputPolicy(tf32=True))
    cases = [*task.gpu.check, *draw_hidden(task, "gpu", "check", 1)]
    errors = [e for c in cases for e in sampler.torch_errors(sampler.fresh(c, 1))]
    assert len(errors) >= 10
    assert all(max(e.row, e.element) < numerics.MOST_TORCH_ERROR for e in errors)


@pytest.mark.nightly
def test_a_sample_of_a_convolution_alone_is_a_row_too():
    given = torch.randn(4, 8, 48), torch.randn(8, 8, 3)
    draft = make_draft(next(find_rooms(make_operation(F.conv1d, given))))
    assert "row_dims = 2" in task_toml(draft).splitlines()


def norm_by_groups(x, z, weight):
    y = (x * F.silu(z)).view(x.shape[0], 8, -1)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).flatten(1) * weight


@pytest.mark.nightly
def test_infinities_that_hardly_ever_meet_what_vanishes_are_no_inputs(in_process):
    """In few draws as cases have them, no infinity of `x` meets a `z` below -88."""
    torch.manual_seed(0)
    given = torch.randn(2048, 512), torch.randn(2048, 512), torch.randn(512) * 0.1 + 1
    assert not make_draft(next(find_rooms(make_operation(norm_by_groups, given)))).nonfinite
    for function in (F.silu, lambda x: x.softmax(-1)):
        assert make_draft(next(find_rooms(make_operation(function, torch.randn(64, 64))))).nonfinite


@pytest.mark.nightly
def test_infinities_are_no_inputs_where_torchs_own_formula_decides():
    """A layer norm's gradient at an infinity: its kernel for CPUs gives NaN where the simpler
    operations that Inductor has for it, and its kernel for GPUs, keep infinities. Forward it is NaN
    either way.
    """
    for backward in (True, False):
        operation = make_operation(nn.LayerNorm(64), torch.randn(48, 64), backward=backward)
        assert make_draft(next(find_rooms(operation))).nonfinite is not backward


def test_infinities_are_no_inputs_where_simpler_operations_resize():
    """Inductor's resizing takes differences of neighbours: its seeds had NaN where torch has an
    infinity, and none was kept.
    """
    operation = make_operation(
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), torch.randn(1, 1, 16, 16)
    )
    assert not make_draft(next(find_rooms(operation))).nonfinite


@pytest.mark.nightly
def test_infinities_are_no_inputs_where_a_size_decides_the_algorithm():
    """A Fourier transform's NaN are elsewhere in float32 at some lengths: hidden cases of those
    ended `kagent new` with a fault of its own task.
    """
    operation = make_operation(lambda x: torch.fft.rfft(x).abs(), torch.randn(64, 512))
    assert not make_draft(next(find_rooms(operation))).nonfinite


@pytest.mark.parametrize(
    ("function", "name"),
    [(lambda x: x.var(0), "M"), (lambda x: x.diff(dim=1).abs().mean(), "N")],
)
def test_sizes_at_which_nothing_is_finite_are_none(function, name):
    draft = make_draft(next(find_rooms(make_operation(function, torch.randn(64, 48)))))
    assert min(case.sizes[name] for case in draft.cpu.check) > 1


def stepped(weight, gradient, momentum):
    weight.sub_(0.01 * (0.9 * momentum + 0.1 * gradient).sign())
    momentum.lerp_(gradient, 0.01)


def test_the_tolerance_of_what_is_written_is_that_of_what_is_returned():
    """No result was counted, so that each element was as if a sum of all."""
    draft = make_draft(next(find_rooms(make_operation(stepped, (torch.randn(512, 256),) * 3))))
    assert draft.floor < 8


class Shifted(nn.Module):
    """Divides by a norm that only a module of zeros has as 0."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(64))

    def forward(self, x):
        return F.normalize(x + self.shift, dim=-1)


def divided_by_the_norm_of_all(x):
    return x / (x.norm() + 1e-10)


@pytest.mark.nightly
@pytest.mark.parametrize("target", [Shifted(), divided_by_the_norm_of_all])
def test_a_limit_that_needs_a_call_of_zeros_is_no_hole(tmp_path, in_process, target):
    made = make_task(make_operation(target, torch.randn(96, 64)), tmp_path / "t", seeds=False)
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


@pytest.mark.nightly
def test_what_amplifies_rounding_at_small_sizes_begins_at_larger_ones():
    torch.manual_seed(0)
    room = next(find_rooms(make_operation(Deep, torch.randn(64, 8, 32, 32))))
    draft = make_draft(room)
    cases = [c.sizes for kind in (draft.cpu, draft.gpu) for c in (*kind.check, *kind.bench)]
    assert min(math.prod(s.values()) for s in cases) > math.prod(room.least.values())
    # A calibration takes no larger floor: the rest of the noise is times torch's own error.
    assert (draft.floor, draft.k <= 16) == (64.0, True)


def capped(x, weight, bias):
    return 20 * torch.tanh(F.linear(x, weight, bias) / 20)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("function", "given", "least"),
    [
        (capped, ((128, 64), (32, 64), (32,)), {"M": 1, "K": 1, "N": 8}),
        (lambda x, y: 1.1 * x + 0.3 * y, ((64, 48), (64, 48)), {"M": 1, "N": 8}),
        (lambda x: x.sum(-1), ((48, 64),), {"M": 8, "N": 1}),
        (lambda x: x.softmax(-1), ((64, 48),), {"M": 1, "N": 1}),
    ],
)
def test_rows_of_so_few_elements_that_all_may_cancel_by_chance_are_no_cases(function, given, least):
    """An element is held against its row's mean: one that is a sum's rounding needs others."""
    torch.manual_seed(0)
    draft = make_draft(next(find_rooms(make_operation(function, tuple(map(torch.randn, given))))))
    for kind in (draft.cpu, draft.gpu):
        (hidden, *_) = kind.hidden_check
        for name, size in least.items():
            assert min(c.sizes[name] for c in kind.check) == size
            assert f"min = {size}," in hidden.dims[name]


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
    room = next(find_rooms(make_operation(function, torch.randn(1024, 64))))
    with pytest.raises(AuthoringError, match=rf"^its example cannot be a case of {sizes}: .*{why}"):
        make_draft(room)


def test_rounding_may_add_up_along_a_chain_of_operations(monkeypatch):
    def chain(x):
        for _ in range(100):
            x = x * 1.01
        return x

    def tried(function):
        room = next(find_rooms(make_operation(function, torch.randn(64, 32))))
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


def tried(function, inputs):
    """What a first case of a function shows, at the example's own sizes."""
    room = next(find_rooms(make_operation(function, inputs)))
    case = DraftCase(room.trace.dims, "float32")
    kind = DraftKind((case,), (case,))
    draft = TaskDraft(room.trace, kind, kind)
    with trial.written(draft) as folder:
        return Trials(draft, folder).case(case, "trial", timed=True)


def quantized(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def largest_half(x):
    return x.masked_fill(x < x.median(-1, keepdim=True).values, float("-inf"))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: (x * 3).to(torch.bfloat16), torch.float32),
        (quantized, torch.float32),
        (quantized, torch.bfloat16),
        (largest_half, torch.float32),
    ],
)
def test_results_of_fewer_bits_and_with_infinities_can_be_cases(function, dtype):
    torch.manual_seed(0)
    found = tried(function, torch.randn(64, 32).to(dtype))
    assert (found.why, found.failed) == ("", False)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: (x + 1e-3).log(), "is not finite"),
        (lambda x: x / 0, "is not finite"),
        (lambda x: x.masked_fill((x + 1e6) - 1e6 < 0.05, torch.inf), "is not finite"),
        (
            lambda x: (x.to(torch.bfloat16) * 3).float(),
            r"torch errs by \d+e?\S* epsilons in its worst element, 128 at most are expected: "
            "it computes in torch.bfloat16 on the way",
        ),
        (lambda x: (x + 1e6) - 1e6, r"epsilons in its worst \w+, 128 at most are expected$"),
        (
            lambda x: torch.linalg.cholesky(x.T @ x - 9),
            r"^reference.py, line \d+ \(.*cholesky.*\): reference: case trial: .*Error",
        ),
    ],
)
def test_what_is_no_case_is_said_with_what_was_expected(function, why):
    torch.manual_seed(0)
    found = tried(function, torch.randn(64, 32))
    assert re.search(why, found.why) is not None, found.why
    assert found.failed == found.why.startswith("reference.py")


def of_the_largest(x, y):
    return y.gather(-1, x.topk(4, dim=-1).indices)


def of_the_largest_stably(x, y):
    return y.gather(-1, x.sort(dim=-1, descending=True, stable=True).indices[:, :4])


@pytest.mark.parametrize(
    ("function", "tied"),
    [
        (of_the_largest, True),
        (lambda x, y: y.gather(-1, x.argmax(-1, keepdim=True)), True),
        (of_the_largest_stably, False),
        (lambda x, y: x.topk(4).values.sum(-1) * y[:, 0], False),
        (lambda x, y: (x.topk(4).indices, x.sort(-1).values * y), False),
    ],
)
def test_rows_of_ties_are_no_cases_where_a_result_depends_on_their_order(function, tied):
    torch.manual_seed(0)
    operation = make_operation(function, (torch.randn(48, 64), torch.rand(48, 64)))
    _, draft = new_task._tried_rooms(find_rooms(operation), lambda _: None)
    assert ("constant" in draft.rows) != tied
    assert "spiked" in draft.rows
    assert "mixed" in {c.inputs for c in draft.cpu.check}


def test_constant_rows_are_no_cases_of_a_norm_that_rounding_decides():
    """Of a mean that is off by its last digit a norm makes 300 times as much; 128 numbers that are
    equal have an exact sum.
    """
    given = (torch.randn(256, 128), torch.randn(128), torch.randn(128))
    operation = make_operation(lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), given)
    draft = make_draft(next(find_rooms(operation)))
    assert "constant" not in draft.rows
    assert {"zeros", "spiked"} <= set(draft.rows)


def test_what_takes_long_is_called_often_enough_for_a_quick_call():
    calls = []

    def function():
        calls.append(time.sleep(0.03))
        return ()

    Trials._timed(function)
    assert len(calls) >= 5


def test_few_rows_of_nonfinite_inputs_are_not_all_finite():
    """A function of long rows has cases of two or three."""
    space = {}
    exec(
        reference_py(make_draft(next(find_rooms(make_operation(torch.relu, torch.randn(64, 64)))))),
        space,
    )
    for rows in (1, 2, 3, 20):
        x, generator = torch.randn(rows, 40), torch.Generator().manual_seed(3)
        mixed, nonfinite = (
            space["_varied"](x, Case(name="few", dtype="float32", inputs=kind), generator)
            for kind in ("mixed", "nonfinite")
        )
        assert mixed.isfinite().all()
        assert 1 <= (~nonfinite.isfinite()).any(1).sum() < rows + (rows == 1)


def test_parts_of_a_vector_are_of_several_kinds():
    """It has no rows; in a task of vectors alone, no case would differ from another."""
    space = {}
    exec(
        reference_py(make_draft(next(find_rooms(make_operation(torch.relu, torch.randn(4096)))))),
        space,
    )
    x, generator = torch.randn(1000), torch.Generator().manual_seed(3)
    normal, mixed, nonfinite = (
        space["_varied"](x, Case(name="flat", dtype="float32", inputs=kind), generator)
        for kind in ("normal", "mixed", "nonfinite")
    )
    assert normal is x
    assert mixed.shape == x.shape
    assert mixed.isfinite().all()
    assert {0.0, 1.0} <= {float(part.count_nonzero() > 0) for part in mixed.split(64)}
    assert 1 <= sum(not p.isfinite().all() for p in nonfinite.split(64)) < 16


def test_a_nonfinite_number_of_a_vector_is_not_lost_in_its_padding():
    space = {}
    exec(
        reference_py(make_draft(next(find_rooms(make_operation(torch.relu, torch.randn(4096)))))),
        space,
    )
    case = Case(name="short", dtype="float32", inputs="nonfinite")
    for seed in range(32):
        generator = torch.Generator().manual_seed(seed)
        assert not space["_varied"](torch.randn(3), case, generator).isfinite().all()


def cached_scores(q, k):
    return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ k


def test_float32_cases_of_a_16_bit_example_have_a_tolerance_of_their_own(tmp_path, in_process):
    """They had the two machine epsilons that bfloat16 has, which other orders of sums exceed."""
    given = torch.randn(4, 128, 64).bfloat16(), torch.randn(4, 96, 64).bfloat16()
    made = make_task(make_operation(cached_scores, given), tmp_path / "t", seeds=False)
    task = load_task(made.folder)
    assert {c.dtype for c in task.cpu.check} == {"float32"}
    (there,), (here,) = task.calibrated("gpu").results, task.calibrated("cpu").results
    assert (there.k, there.floor) == (3.0, 2.0)
    assert here.floor > 2.5
    assert task.calibration.kinds["cpu"].results["y"].why.startswith("kagent new: ")


def test_a_result_of_8_bits_may_follow_a_convolution():
    taps = torch.tensor([0.05, 0.25, 0.4, 0.25, 0.05])

    def smoothed(x):
        y = F.conv1d(x[:, None], taps[None, None], padding=2)[:, 0]
        return (y / y.abs().amax(-1, keepdim=True) * 448).to(torch.float8_e4m3fn)

    operation = make_operation(smoothed, torch.randn(64, 256))
    draft = make_draft(next(find_rooms(operation)))
    assert draft.gpu.check


def test_what_does_not_run_in_float64_is_said():
    def product(a, b, scale):
        return torch._scaled_mm(a, b.t(), scale, scale, out_dtype=torch.bfloat16)

    def inputs():
        a, b = (torch.randn(n, 64).to(torch.float8_e4m3fn) for n in (32, 48))
        return a, b, torch.ones(())

    operation = make_operation(product, inputs)
    with pytest.raises(AuthoringError, match="it does not run in float64, as the reference does"):
        make_draft(next(find_rooms(operation)))
