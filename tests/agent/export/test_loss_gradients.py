"""Gradients that a loss has computed in its forward pass, and what backward passes make of them."""

import gc
import os
import sys
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import triton
from kagent.export.library import _gradients, _triton_scale
from kagent.export.library._dispatch import FallbackWarning
from kagent.export.library._helpers import check_classes
from library_package import CROSS_ENTROPY, LINEAR_CROSS_ENTROPY, assemble, calls
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

N = 7
TARGET = torch.tensor([3, -100, 0, 6, 2])


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses") / "lib"
    package = assemble(folder, "loss_ops", ("cross_entropy", "linear_cross_entropy"))
    package.add_kernel("cross_entropy", CROSS_ENTROPY)
    package.add_kernel("linear_cross_entropy", LINEAR_CROSS_ENTROPY)
    return package.imported("loss_library")


@pytest.fixture(params=["cross_entropy", "linear_cross_entropy"])
def losses(request, library):
    """A loss, torch's, and how to draw what they depend on."""
    if request.param == "cross_entropy":
        ours = library.cross_entropy.cross_entropy
        return (
            lambda x: ours(x, TARGET),
            lambda x: F.cross_entropy(x, TARGET),
            lambda: (torch.randn(5, N, requires_grad=True),),
        )
    ours = library.linear_cross_entropy.linear_cross_entropy
    return (
        lambda x, w: ours(x, w, TARGET),
        lambda x, w: F.cross_entropy(x @ w.T, TARGET),
        lambda: (torch.randn(5, 4, requires_grad=True), torch.randn(N, 4, requires_grad=True)),
    )


def gradients(loss, leaves, factor=1.0, **options):
    found = torch.autograd.grad(loss(*leaves) * factor, leaves, **options)
    return tuple(g.clone() for g in found)


@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3, 65536.0, 0.0, -2.0])
def test_the_factor_that_comes_in_counts(losses, factor):
    ours, torchs, draw = losses
    leaves = draw()
    found, expected = gradients(ours, leaves, factor), gradients(torchs, leaves, factor)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * abs(factor))


def saved_of(loss):
    """What the graph of a loss keeps that is as large as its inputs."""
    return [t for t in loss.grad_fn.saved_tensors if t is not None]


def test_the_saved_gradient_itself_is_handed_out_scaled_in_place(losses):
    ours, _, draw = losses
    for factor in (1.0, 0.5):
        leaves = draw()
        loss = ours(*leaves)
        saved = [t.data_ptr() for t in saved_of(loss)]
        found = torch.autograd.grad(loss, leaves, torch.tensor(factor))
        assert [g.data_ptr() for g in found] == saved
        del loss
        (ours(*leaves) * 1.0).backward()  # .grad takes it over without a copy
        assert all(leaf.grad.is_contiguous() for leaf in leaves)


def test_where_the_factor_is_1_nothing_is_written(losses):
    ours, _, draw = losses
    leaves = draw()
    loss = ours(*leaves)
    versions = [t._version for t in saved_of(loss)]
    found = torch.autograd.grad(loss, leaves)
    assert [g._version for g in found] == versions


def test_a_second_backward_is_right_whatever_the_factors(losses):
    ours, torchs, draw = losses
    leaves, factors = draw(), (0.5, 3.0, 1.0, 0.5)
    loss = ours(*leaves)
    for i, factor in enumerate(factors, 1):
        loss.backward(torch.tensor(factor), retain_graph=i < len(factors))
    expected = gradients(torchs, leaves, sum(factors))
    torch.testing.assert_close(tuple(leaf.grad for leaf in leaves), expected)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_of_an_earlier_backward_are_not_touched_by_a_later_one(losses):
    ours, _, draw = losses
    leaves = draw()
    loss = ours(*leaves)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    kept = [g.clone() for g in first]
    torch.autograd.grad(loss, leaves, torch.tensor(5.0))
    torch.testing.assert_close(list(first), kept)


def test_a_sum_of_losses_and_a_loss_that_is_used_twice(losses):
    ours, torchs, draw = losses
    leaves = draw()

    def twice(loss):
        return lambda *own: loss(*own) * 0.5 + loss(*own).square()

    def reused(loss):
        def of(*own):
            value = loss(*own)
            return value + 2 * value.exp()

        return of

    for made in (twice, reused):
        torch.testing.assert_close(
            gradients(made(ours), leaves), gradients(made(torchs), leaves), rtol=1e-4, atol=1e-5
        )


def test_accumulated_steps_add_up(losses):
    ours, torchs, draw = losses
    leaves = draw()
    for loss in (ours, torchs):
        for _ in range(4):
            (loss(*leaves) / 4).backward()
        if loss is ours:
            found = [leaf.grad.clone() for leaf in leaves]
            for leaf in leaves:
                leaf.grad = None
    torch.testing.assert_close(found, [leaf.grad for leaf in leaves])


def test_no_second_derivative_and_never_a_wrong_one(losses):
    ours, _, draw = losses
    leaves = draw()
    loss = ours(*leaves)
    first = torch.autograd.grad(loss, leaves, create_graph=True)
    penalised = loss + sum(g.square().sum() for g in first)
    with pytest.raises(RuntimeError, match="no second derivative"):
        penalised.backward()


def test_batched_gradients(losses):
    ours, torchs, draw = losses
    leaves, factors = draw(), torch.tensor([1.0, 2.0, -1.0])
    found, expected = (
        torch.autograd.grad(loss(*leaves), leaves, factors, is_grads_batched=True)
        for loss in (ours, torchs)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("factor", [1.0, 1 / 3, 65536.0])
def test_bfloat16_loses_nothing_but_a_rounding(library, factor):
    logits = torch.randn(512, 64).bfloat16().requires_grad_()
    target = torch.randint(64, (512,))
    loss = library.cross_entropy.cross_entropy(logits, target)
    assert loss.dtype == torch.float32
    (ours,) = torch.autograd.grad(loss * factor, logits)
    wide = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(wide, target) * factor, wide)
    error = (ours.double() - exact).abs() / exact.abs()
    assert error.max() <= 2 * 2**-8  # the kernel's rounding and that of the product
    bias = ((ours.double() - exact) * exact).sum() / exact.square().sum()
    assert abs(bias) < 2**-11  # the factor itself was not rounded to bfloat16


def test_float16_is_scaled_before_it_is_rounded(library):
    """What a loss scaler is for: most of these gradients are below what float16 can hold."""
    logits = (torch.randn(4096, 64) * 3).half().requires_grad_()
    target = torch.randint(64, (4096,))
    loss = library.cross_entropy.cross_entropy(logits, target)
    (ours,) = torch.autograd.grad(loss * 1024.0, logits)
    wide = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(F.cross_entropy(wide, target) * 1024, wide)
    assert loss.dtype == torch.float32
    assert (ours.double() - exact).norm() / exact.norm() < 1e-3
    assert (ours == 0).sum() < 0.01 * ours.numel()


def test_only_what_is_asked_for_is_kept(library):
    loss_of = library.linear_cross_entropy.linear_cross_entropy
    x, weight = torch.randn(5, 4), torch.randn(N, 4)
    for asks in ((True, False), (False, True), (True, True)):
        own = [t.clone().requires_grad_(ask) for t, ask in zip((x, weight), asks, strict=True)]
        loss = loss_of(*own, TARGET)
        assert [t.shape for t in saved_of(loss)] == [
            t.shape for t, ask in zip(own, asks, strict=True) if ask
        ]
        loss.backward()
        assert [t.grad is not None for t in own] == list(asks)


@pytest.mark.parametrize("asks", [False, True])
def test_nothing_is_kept_without_a_gradient(library, asks):
    shape = (13, 17)
    target = torch.randint(17, (13,))
    with torch.set_grad_enabled(asks):
        loss = library.cross_entropy.cross_entropy(torch.randn(shape, requires_grad=True), target)
    assert (loss.grad_fn is not None) == asks
    del target
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is torch.Tensor and o.shape == shape]
    assert bool(found or (asks and saved_of(loss))) == asks


def test_evaluation_takes_one_product_and_no_kernel(library):
    module = library.linear_cross_entropy
    before = len(calls(library, "linear_cross_entropy"))
    x, weight = torch.randn(50, 4, requires_grad=True), torch.randn(N, 4)
    target = torch.randint(N, (50,))
    target[::3] = 5
    expected = F.cross_entropy(x @ weight.T, target, ignore_index=5)
    with torch.no_grad():
        whole = module.linear_cross_entropy(x, weight, target, ignore_index=5)
        module._LOGITS, kept = 3 * N, module._LOGITS
        chunks = module.linear_cross_entropy(x, weight, target, ignore_index=5)
        module._LOGITS = kept
    torch.testing.assert_close(whole, expected)
    torch.testing.assert_close(chunks, expected)
    assert len(calls(library, "linear_cross_entropy")) == before


@pytest.mark.parametrize("some_count", [True, False])
@pytest.mark.filterwarnings("ignore:.*torch's own implementation is used.*")
def test_what_no_kernel_was_checked_for_is_computed_in_parts(library, monkeypatch, some_count):
    module = library.linear_cross_entropy
    monkeypatch.setattr(module, "_LOGITS_LEARNED", 3 * N)
    x, weight = torch.randn(50, 4).double(), torch.randn(N, 4).double()
    target = torch.randint(N, (50,)) if some_count else torch.full((50,), 5)
    target[::3] = 5
    results, kept = [], []
    for function in (
        lambda *a: module.linear_cross_entropy(*a, target, ignore_index=5),
        lambda x, w: F.cross_entropy(x @ w.T, target, ignore_index=5),
    ):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        pack, unpack = lambda t: kept.append(t.shape) or t, lambda t: t
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = function(*leaves)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    torch.testing.assert_close(*results, equal_nan=True)
    assert kept[:2] == [x.shape, weight.shape]  # no logits


@pytest.mark.parametrize("ignored", [0, 3, -1, 1000])
def test_any_ignore_index_reaches_the_kernel_as_its_own(library, ignored):
    x = torch.randn(5, N, requires_grad=True)
    weight = torch.randn(N, N, requires_grad=True)
    target = torch.tensor([3, ignored, 0, 6, ignored])
    before = [len(calls(library, t)) for t in ("cross_entropy", "linear_cross_entropy")]
    found = library.cross_entropy.cross_entropy(x, target, ignored)
    torch.testing.assert_close(found, F.cross_entropy(x, target, ignore_index=ignored))
    found = library.linear_cross_entropy.linear_cross_entropy(x, weight, target, ignored)
    torch.testing.assert_close(found, F.cross_entropy(x @ weight.T, target, ignore_index=ignored))
    after = [len(calls(library, t)) for t in ("cross_entropy", "linear_cross_entropy")]
    assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1]


@pytest.mark.parametrize(("wrong", "ignored"), [(N, -100), (-1, -100), (-100, 3), (10**12, 3)])
def test_a_target_out_of_range_is_an_error_and_not_a_write_elsewhere(
    losses, library, wrong, ignored
):
    x, weight = torch.randn(3, N, requires_grad=True), torch.randn(N, N)
    target = torch.tensor([1, wrong, 2])
    with pytest.raises(IndexError, match="out of range"):
        library.cross_entropy.cross_entropy(x, target, ignored)
    with pytest.raises(IndexError, match="out of range"):
        library.linear_cross_entropy.linear_cross_entropy(x, weight, target, ignored)


def test_targets_that_are_in_range():
    for target in ([], [0, 6], [-100, -100], [-100, 6, 0]):
        check_classes(torch.tensor(target, dtype=torch.int64), N, -100)
    check_classes(torch.tensor([9, 3]), N, 9)


def test_other_reductions_are_refused_by_name(library):
    x = torch.randn(5, N)
    for call in (
        lambda: library.cross_entropy.cross_entropy(x, TARGET, reduction="sum"),
        lambda: library.cross_entropy.CrossEntropyLoss(reduction="none"),
        lambda: library.linear_cross_entropy.linear_cross_entropy(x, x[:, :N], TARGET, -100, "sum"),
        lambda: library.linear_cross_entropy.FusedLinearCrossEntropyLoss(reduction="none"),
    ):
        with pytest.raises(ValueError, match=r'only "mean" is supported'):
            call()


def test_all_ignored_is_nan_and_no_gradient(losses, library):
    target = torch.full((5,), -100)
    x = torch.randn(5, N, requires_grad=True)
    loss = library.cross_entropy.cross_entropy(x, target)
    loss.backward()
    assert loss.isnan()
    assert not x.grad.any()


def test_hooks_that_move_saved_tensors_away_and_back(losses):
    ours, torchs, draw = losses
    leaves = draw()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        found = gradients(ours, leaves, 0.5)
    torch.testing.assert_close(found, gradients(torchs, leaves, 0.5))


def test_checkpointing_computes_it_again(losses):
    ours, torchs, draw = losses
    leaves = draw()
    again = torch.utils.checkpoint.checkpoint(ours, *leaves, use_reentrant=False)
    found = torch.autograd.grad(again * 0.5, leaves)
    torch.testing.assert_close(found, gradients(torchs, leaves, 0.5))


def test_without_torchs_word_on_the_graph_it_is_taken_as_kept(losses, library, monkeypatch):
    module = sys.modules[f"{library.__name__}._gradients"]
    monkeypatch.delattr(torch._C._autograd, "_get_current_graph_task_keep_graph")
    assert module._graph_is_kept()
    ours, torchs, draw = losses
    leaves = draw()
    torch.testing.assert_close(gradients(ours, leaves, 3.0), gradients(torchs, leaves, 3.0))


def test_a_graph_is_known_to_be_freed():
    """What scaling in place rests on, of torch's own word."""
    seen = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(_gradients._graph_is_kept())
            return grad * 2

    x = torch.ones(3, requires_grad=True)
    Probe.apply(x).sum().backward()
    y = Probe.apply(x).sum()
    y.backward(retain_graph=True)
    torch.autograd.grad(y, x, create_graph=True)
    assert seen == [False, True, True]
    assert _gradients._graph_is_kept()  # outside of a backward pass, to be safe


SCALE_IN_THE_INTERPRETER = """
import torch, triton
from kagent.export.library._triton_scale import _scale
for n in (1, 4095, 4096, 4097, 50000):
    for value in (1.0, 1 / 3, -65536.0):
        x, factor = torch.randn(n), torch.tensor(value)
        expected = x * factor
        _scale[(min(triton.cdiv(n, 4096), 3),)](x, factor, n, BLOCK=4096)
        assert torch.equal(x, expected), (n, value)
"""


def version(module):
    return tuple(map(int, module.__version__.split(".")[:2]))


@pytest.mark.skipif(
    version(triton) < (3, 7) and version(np) >= (2, 4),
    reason="the interpreter of Triton 3.6 takes no loop bounds from numpy 2.4",
)
def test_the_gpus_kernel_for_scaling_in_tritons_interpreter(bare_python, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = bare_python.run("-c", SCALE_IN_THE_INTERPRETER, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


def test_the_gpus_kernel_for_scaling_compiles_and_loads_vectors(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    signature = {"x_ptr": "*bf16", "factor_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=_triton_scale._scale,
        signature=signature,
        constexprs={"BLOCK": 4096},
        attrs={(0,): aligned, (2,): aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "ld.global.v4" in compiled.asm["ptx"]
    assert "st.global.v4" in compiled.asm["ptx"]


def test_where_triton_does_not_run_torch_scales_and_says_so_once(monkeypatch):
    def fail(x, factor):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(_triton_scale, "scale_", fail)
    monkeypatch.setattr(_gradients, "_without_triton", [])
    x, factor = torch.ones(3), torch.tensor(2.0)
    with pytest.warns(FallbackWarning, match="scaled by torch.*no C compiler"):
        assert not _gradients._scaled_by_kernel(x, factor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not _gradients._scaled_by_kernel(x, factor)
    assert torch.equal(x, torch.ones(3))


def test_the_operators_own_reference_has_the_right_gradients(library):
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, N), (N, N)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, both = (
            library.cross_entropy._cross_entropy.op,
            library.linear_cross_entropy._linear_cross_entropy.op,
        )
        assert torch.autograd.gradcheck(lambda x: one(x, TARGET, -100)[0], (x,))
        assert torch.autograd.gradcheck(lambda x, w: both(x, w, TARGET, -100)[0], (x, weight))


def test_what_no_kernel_takes_is_torchs_own_loss_with_its_second_derivative(losses):
    ours, torchs, draw = losses
    leaves = [t.detach().double().requires_grad_() for t in draw()]

    def penalty(loss):
        found = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in found), leaves)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(penalty(ours), penalty(torchs))
