"""A known call goes to its kernel at once; who watches the dispatcher sees it all the same."""

import re
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from library_package import KERNELS, assemble, calls
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

TASKS = ("gelu", "softmax", "attention", "cross_entropy", "linear_cross_entropy")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    package = assemble(tmp_path_factory.mktemp("short") / "lib", "short_way", TASKS)
    for task in TASKS:
        package.add_kernel(task, KERNELS[task])
    return package.imported("short_way_library")


def _functions(library):
    torch.manual_seed(0)
    target = torch.randint(24, (8,))
    return {
        "gelu": (library.gelu.gelu, (torch.randn(8, 24),)),
        "softmax": (library.softmax.softmax, (torch.randn(8, 24),)),
        "attention": (library.attention.attention, tuple(torch.randn(3, 1, 2, 5, 16))),
        "cross_entropy": (
            lambda x: library.cross_entropy.cross_entropy(x, target),
            (torch.randn(8, 24),),
        ),
        "linear_cross_entropy": (
            lambda x, w: library.linear_cross_entropy.linear_cross_entropy(x, w, target),
            (torch.randn(8, 16).requires_grad_(), torch.randn(24, 16).requires_grad_()),
        ),
    }


@pytest.fixture(params=TASKS)
def known(library, request):
    """A task's operator, a function for users and arguments with which it was called before."""
    function, args = _functions(library)[request.param]
    for _ in range(2):
        function(*args)
    module = getattr(library, request.param)
    return getattr(module, f"_{request.param}"), function, args


@pytest.fixture
def gelu(library):
    x = torch.randn(8, 24)
    library.gelu.gelu(x)
    return library.gelu._gelu, x


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.namespace)
        return func(*args, **(kwargs or {}))


class WatchFunctions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_known_call_does_not_pass_the_dispatcher(known, monkeypatch):
    operator, function, args = known
    expected = function(*args)

    def refuse(*_):
        raise AssertionError("the dispatcher was asked")

    monkeypatch.setattr(operator, "op", refuse)
    assert torch.equal(function(*args), expected)


def test_a_call_of_another_kind_does(known, monkeypatch):
    operator, function, args = known
    asked = []
    op = operator.op
    monkeypatch.setattr(operator, "op", lambda *a: asked.append(a) or op(*a))
    function(*(a.detach().bfloat16().requires_grad_(a.requires_grad) for a in args))
    function(*args)
    assert len(asked) == 1


def test_a_dispatch_mode_sees_it(known):
    operator, function, args = known
    with Watch() as watch:
        function(*args)
    assert operator._namespace in watch.seen


def test_a_function_mode_sees_it(known):
    operator, function, args = known
    with WatchFunctions() as watch:
        function(*args)
    assert any(operator._namespace in s for s in watch.seen)


def test_a_profiler_sees_it(known):
    operator, function, args = known
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        function(*args)
    assert f"{operator._namespace}::{operator.name}" in {e.name for e in found.events()}


def test_a_tracer_sees_it(known):
    operator, function, args = known
    plain = [a.detach() for a in args]
    function(*plain)
    for pre_dispatch in (False, True):
        graph = make_fx(lambda *a: function(*a), pre_dispatch=pre_dispatch)(*args)
        assert any(operator._namespace in str(n.target) for n in graph.graph.nodes)


def test_torch_jit_traces_it(library, gelu):
    operator, x = gelu
    traced = torch.jit.trace(library.gelu.gelu, (x,))
    assert f"{operator._namespace}::gelu" in str(traced.graph)
    torch.testing.assert_close(traced(2 * x), F.gelu(2 * x, approximate="tanh"))


def test_symbols_of_torch_fx_go_the_long_way(library, gelu):
    _, x = gelu
    traced = torch.fx.symbolic_trace(library.gelu.gelu)
    torch.testing.assert_close(traced(x), F.gelu(x, approximate="tanh"))


def test_transforms_see_it(gelu):
    operator, x = gelu
    torch.testing.assert_close(
        torch.vmap(operator)(torch.stack([x, 2 * x])),
        F.gelu(torch.stack([x, 2 * x]), approximate="tanh"),
    )
    with pytest.raises(RuntimeError, match="functorch transforms"):  # not: no gradient at all
        torch.func.grad(lambda a: operator(a).sum())(x)


@pytest.mark.parametrize("task", ["gelu", "softmax", "attention"])
def test_gradients_of_torch_func_are_torchs(library, task):
    function, args = _functions(library)[task]
    function(*args)
    found = torch.func.grad(lambda a: function(a, *args[1:]).square().sum())(args[0])
    leaf = args[0].clone().requires_grad_()
    function(leaf, *args[1:]).square().sum().backward()
    torch.testing.assert_close(found, leaf.grad)
    if task != "attention":  # torch's own has no second derivative on a CPU
        hessian = torch.func.hessian(lambda a: function(a).square().sum())(args[0])
        assert hessian.shape == args[0].shape * 2


@pytest.mark.parametrize("task", TASKS)
def test_derivatives_in_forward_mode_are_torchs(library, task):
    """An operator has none, and would drop the tangents without a word."""
    function, args = _functions(library)[task]
    args = [a.detach() for a in args]
    tangents = [torch.randn_like(a) for a in args]
    function(*args)
    if task == "attention":  # torch's has no derivative in forward mode, and says so
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
            function(*(forward_ad.make_dual(a, t) for a, t in zip(args, tangents, strict=True)))
        return
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(a, t) for a, t in zip(args, tangents, strict=True)]
        found = forward_ad.unpack_dual(function(*duals)).tangent
    small = 1e-3
    up, down = (
        function(*(a + sign * small * t for a, t in zip(args, tangents, strict=True)))
        for sign in (1, -1)
    )
    torch.testing.assert_close(found, (up - down) / (2 * small), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("seen_before", [True, False])
def test_operators_of_torch_ops_refuse_tangents(library, task, seen_before):
    operator = getattr(getattr(library, task), f"_{task}")
    target = torch.randint(24, (8,))
    args = {
        "attention": (*torch.randn(3, 1, 2, 5, 16), False),
        "cross_entropy": (torch.randn(8, 24), target, -100),
        "linear_cross_entropy": (torch.randn(8, 16), torch.randn(24, 16), target, -100),
    }.get(task, (torch.randn(8, 24),))
    operator._dispatch.calls.clear()
    if seen_before:
        operator.op(*args)
    own = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]

    def call(*tensors):
        given = list(args)
        for i, tensor in zip(own, tensors, strict=True):
            given[i] = tensor
        return operator.op(*given)

    tensors = tuple(args[i] for i in own)
    tangents = tuple(map(torch.randn_like, tensors))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(call, tensors, tangents)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(a, t) for a, t in zip(tensors, tangents, strict=True)]
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            call(*duals)
        call(*tensors)  # none of them has a tangent


def test_negated_views_and_sparse_tensors_go_the_long_way(library, gelu):
    operator, x = gelu
    negated = torch.complex(x, x).conj().imag
    assert negated.is_neg()
    assert negated.shape == x.shape
    assert operator.at_once(negated) is None
    torch.testing.assert_close(library.gelu.gelu(negated), F.gelu(-x, approximate="tanh"))
    assert operator.at_once(x.to_sparse()) is None


def test_nested_tensors_go_to_torch(library):
    parts = [torch.randn(2, n, 16) for n in (5, 3)]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided)
    found = library.attention.attention(nested, nested, nested)
    theirs = F.scaled_dot_product_attention(nested, nested, nested)
    torch.testing.assert_close(found.unbind(), theirs.unbind())
    for x in (nested, torch.nested.nested_tensor([p[0] for p in parts], layout=torch.jagged)):
        assert library.gelu._gelu.at_once(x) is None
        found = library.gelu.gelu(x)
        torch.testing.assert_close(found.unbind(), F.gelu(x, approximate="tanh").unbind())


def test_subclasses_go_the_long_way(library, gelu):
    operator, x = gelu

    class Marked(torch.Tensor):
        pass

    marked = x.as_subclass(Marked)
    assert operator.at_once(marked) is None
    assert type(library.gelu.gelu(marked)) is Marked


def test_parameters_are_tensors_like_others(gelu):
    operator, x = gelu
    with torch.no_grad():
        found = operator.at_once(torch.nn.Parameter(x))
    torch.testing.assert_close(found, F.gelu(x, approximate="tanh"))


def test_gradients_are_the_dispatchers(known):
    _, function, args = known
    results = []
    for short in (True, False):
        leaves = [a.detach().clone().requires_grad_() for a in args]
        if short:
            out = function(*leaves)
        else:
            with Watch():
                out = function(*leaves)
        out.square().sum().backward()
        results.append([out.detach(), *(a.grad for a in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_below_autograd_nothing_is_recorded(gelu):
    operator, x = gelu
    leaf = x.clone().requires_grad_()
    assert operator(leaf).requires_grad
    with torch._C._AutoDispatchBelowAutograd():
        assert not operator(leaf).requires_grad
    with torch.no_grad():
        assert not operator(leaf).requires_grad


def test_inference_mode(gelu):
    operator, x = gelu
    leaf = x.clone().requires_grad_()
    with torch.inference_mode():
        for tensor in (leaf, x.clone()):
            found = operator.at_once(tensor)
            assert found.is_inference()
            torch.testing.assert_close(found, F.gelu(x, approximate="tanh"))


def test_autocast_casts_first(library):
    q = torch.randn(1, 2, 5, 16)
    attention = library.attention.attention
    assert attention(q, q, q).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, q, q).dtype == torch.bfloat16
    assert attention(q, q, q).dtype == torch.float32


def test_half_precision_that_learns_stays_torchs(library):
    """The kernel is known to the operator for such logits, and the function may not take it."""
    torch.manual_seed(0)
    x = torch.randn(8, 24, dtype=torch.float16)
    target = torch.randint(24, (8,))
    library.cross_entropy.cross_entropy(x, target)
    before = len(calls(library, "cross_entropy"))
    library.cross_entropy.cross_entropy(x.requires_grad_(), target).backward()
    assert len(calls(library, "cross_entropy")) == before


def test_a_target_out_of_range_is_refused_each_time(library):
    x, target = torch.randn(8, 24), torch.randint(24, (8,))
    library.cross_entropy.cross_entropy(x, target)
    target[3] = 24
    with pytest.raises(IndexError, match="target 24 is out of range: there are 24 classes"):
        library.cross_entropy.cross_entropy(x, target)


@pytest.mark.parametrize("repeats", [True, False])
def test_what_atomics_put_in_order_is_torchs_in_deterministic_mode(tmp_path, repeats):
    package = assemble(tmp_path / "lib", f"short_repeats_{repeats}", ("gelu",))
    package.add_kernel("gelu", KERNELS["gelu"], repeats=repeats)
    library = package.imported(f"short_repeats_{repeats}_library")
    x = torch.randn(4, 8)
    library.gelu.gelu(x)
    torch.use_deterministic_algorithms(True)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                found = library.gelu.gelu(x)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found, F.gelu(x, approximate="tanh"))
    assert len(calls(library, "gelu")) == (3 if repeats else 1)
    assert len(told) == (0 if repeats else 1)
    assert repeats or "order of the atomic operations" in str(told[0].message)
    library.gelu.gelu(x)
    assert len(calls(library, "gelu")) == (4 if repeats else 2)


def test_a_kernel_that_begins_to_fail_is_left(tmp_path):
    package = assemble(tmp_path / "lib", "short_fails", ("gelu",))
    late = "    if len(CALLS) > 2: raise ValueError('late')\n    wide"
    package.add_kernel("gelu", KERNELS["gelu"].replace("    wide", late, 1))
    library = package.imported("short_fails_library")
    x = torch.randn(4, 8)
    library.gelu.gelu(x)
    assert library.gelu._gelu.at_once(x) is not None
    with pytest.warns(UserWarning, match=re.escape("does not run here (ValueError: late)")):
        found = library.gelu.gelu(x)
    torch.testing.assert_close(found, F.gelu(x, approximate="tanh"))
    assert library.gelu._gelu.at_once(x) is None


def test_threads_of_their_own_state(gelu):
    """A mode of one thread is not another's."""
    operator, x = gelu
    found = []
    with Watch() as watch:
        thread = threading.Thread(target=lambda: found.append(operator.at_once(x)))
        thread.start()
        thread.join()
        assert watch.seen == []
        assert operator.at_once(x) is None
    assert found[0] is not None
