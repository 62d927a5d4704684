"""Operators as users call them: values, gradients, torch.compile, autocast, odd inputs."""

import inspect
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from kagent_sandbox.data.build_case import build_case
from kagent_sandbox.data.task import load_task
from library_package import BACKWARD, KERNELS, SEEDS, assemble, calls
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

TASKS = tuple(KERNELS)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _same_numbers():
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """With a kernel for each task, forward only."""
    package = assemble(tmp_path_factory.mktemp("forward") / "lib", "forward_ops", TASKS)
    for task, source in KERNELS.items():
        package.add_kernel(task, source)
    return package.imported("forward_library")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """With kernels for the backward passes, too."""
    package = assemble(tmp_path_factory.mktemp("backward") / "lib", "backward_ops", TASKS)
    for task, source in {**KERNELS, **BACKWARD}.items():
        package.add_kernel(task, source)
    return package.imported("backward_library")


@pytest.fixture(autouse=True)
def _no_fallbacks():
    """Where a test expects none, a warning is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch's own implementation is used.*")
        yield


def run(library, task):
    return calls(library, task)


def functions(library):
    """Each functional form with arguments, and torch's own."""
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    target = torch.tensor([3, -100, 0, 6, 2])
    x, weight = torch.randn(5, 7), torch.randn(7, 7)
    gqa = {"enable_gqa": True}
    return {
        "gelu": (library.gelu.gelu, (x,), lambda a: F.gelu(a, approximate="tanh")),
        "softmax": (library.softmax.softmax, (x,), lambda a: torch.softmax(a, -1)),
        "attention": (
            library.attention.attention,
            (q, k, k + 1),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **gqa),
        ),
        "cross_entropy": (
            lambda a: library.cross_entropy.cross_entropy(a, target),
            (x,),
            lambda a: F.cross_entropy(a, target),
        ),
        "linear_cross_entropy": (
            lambda a, w: library.linear_cross_entropy.linear_cross_entropy(a, w, target),
            (x, weight),
            lambda a, w: F.cross_entropy(a @ w.T, target),
        ),
    }


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def leaves(tensors, dtype=None):
    return tuple(t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in tensors)


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_every_case_of_the_task_is_run_by_the_kernel_and_agrees_with_float64(library, task):
    loaded = load_task(SEEDS / task)
    reference = loaded.reference()
    operator = vars(getattr(library, task))[f"_{task}"]
    for case in loaded.cpu.check:
        tensors = reference.inputs(case, torch.Generator().manual_seed(1), CPU)
        scalars = {
            s.name: s.value for s in build_case(loaded, case).arguments if hasattr(s, "value")
        }
        arguments = {**tensors, **scalars}
        if arguments.get("ignore_index", -100) != -100:
            continue  # the functional form replaces it
        before = len(run(library, task))
        found = operator.op(*(arguments[a.name] for a in loaded.arguments))
        assert len(run(library, task)) == before + 1, case.name
        expected = reference.reference(**arguments)
        for a, b in zip(as_tuple(found), as_tuple(expected), strict=True):
            wide = torch.atleast_1d(b.double())
            of_row = wide.abs().nan_to_num(posinf=0.0).amax(-1, keepdim=True)  # may be huge
            near = (a.double() - wide).abs() <= 3e-4 * of_row.clamp(min=1.0)
            alike = torch.isclose(a.double(), wide, rtol=1e-4, atol=0.0, equal_nan=True)
            assert (near | alike).all(), case.name


@pytest.mark.parametrize("task", TASKS)
def test_values_and_gradients_are_torchs(library, task):
    function, args, torchs = functions(library)[task]
    ours, theirs = leaves(args), leaves(args)
    a, b = function(*ours), torchs(*theirs)
    torch.testing.assert_close(a, b)
    weights = torch.randn(a.shape)
    (a * weights).sum().backward()
    (b * weights).sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_many_gradients_at_once(trained, task):
    """Torch batches what comes in, in tensors that have no memory."""
    function, args, _ = functions(trained)[task]
    function(*leaves(args)).sum().backward()  # all calls are known then
    one, batched = (
        torch.autograd.functional.jacobian(lambda a: function(a, *args[1:]), args[0], vectorize=v)
        for v in (False, True)
    )
    torch.testing.assert_close(batched, one)


@pytest.mark.parametrize("task", ["gelu", "softmax", "attention"])
def test_the_librarys_own_backward_kernel_takes_the_gradient(trained, task):
    function, args, torchs = functions(trained)[task]
    ours, theirs = leaves(args), leaves(args)
    before = len(run(trained, f"{task}_backward"))
    function(*ours).square().sum().backward()
    assert len(run(trained, f"{task}_backward")) == before + 1
    torchs(*theirs).square().sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_attention_in_training_is_torchs_without_a_backward_kernel(library):
    function, args, _ = functions(library)["attention"]
    before = len(run(library, "attention"))
    assert "ScaledDotProduct" in type(function(*leaves(args)).grad_fn).__name__
    assert len(run(library, "attention")) == before
    function(*args)
    assert len(run(library, "attention")) == before + 1


def test_the_raw_operator_of_attention_is_differentiable_even_so(library):
    _, args, torchs = functions(library)["attention"]
    ours, theirs = leaves(args), leaves(args)
    library.attention._attention.op(*ours, False).square().sum().backward()
    torchs(*theirs).square().sum().backward()
    torch.testing.assert_close([t.grad for t in ours], [t.grad for t in theirs])


def test_attention_trains_by_torch_where_no_kernel_computes_the_gradients(tmp_path):
    """What the forward kernel kept would be of no use to torch's backward pass."""
    package = assemble(tmp_path / "lib", "short_ops", ("attention",))
    for task in ("attention", "attention_train"):
        package.add_kernel(task, {**KERNELS, **BACKWARD}[task])
    name = package.add_kernel("attention_backward", BACKWARD["attention_backward"])
    for region in package.tables["attention_backward"]["kernels"][name]["regions"]:
        region["high"] = {**region["high"], "S": 8}
    short = package.imported("short_library")
    for length, kernels in ((8, 1), (9, 0)):
        before = len(calls(short, "attention_train"))
        short.attention.attention(*leaves([torch.randn(1, 2, length, 16)] * 3)).sum().backward()
        assert len(calls(short, "attention_train")) == before + kernels


def test_attention_in_training_keeps_the_log_sum_exp(trained):
    """Of any length, in several batches and below vmap; where torch computes it, too."""
    attention = trained.attention.attention
    for shape in ((4, 9, 16), (2, 4, 9, 16), (2, 3, 4, 9, 16)):
        ours, theirs = (leaves([torch.ones(shape).normal_()] * 3) for _ in range(2))
        for x, y in zip(ours, theirs, strict=True):
            y.data.copy_(x.data)
        before = len(run(trained, "attention_train"))
        attention(*ours, is_causal=True).square().sum().backward()
        assert len(run(trained, "attention_train")) == before + 1
        F.scaled_dot_product_attention(*theirs, is_causal=True).square().sum().backward()
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    args = (*(torch.randn(2, n, 9, 16, requires_grad=True) for n in (4, 2, 2)), True)
    operator = trained.attention._with_lse
    torch.library.opcheck(operator.op, args)
    o, lse = operator._reference(*args)
    found = operator(*args)
    torch.testing.assert_close((o, lse), found)
    assert not found[1].requires_grad
    batched = (torch.stack([a.detach()] * 2) for a in args[:3])
    mapped = torch.vmap(lambda q, k, v: operator.op(q, k, v, True))(*batched)
    torch.testing.assert_close(mapped, tuple(torch.stack([t.detach()] * 2) for t in found))


# -- shapes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5), (2, 1, 3, 5), (), (0, 5), (3, 0)])
def test_gelu_and_softmax_take_any_shape(library, shape):
    x = torch.randn(shape)
    torch.testing.assert_close(library.gelu.gelu(x), F.gelu(x, approximate="tanh"))
    torch.testing.assert_close(library.softmax.softmax(x), torch.softmax(x, -1))


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
def test_softmax_along_any_dimension(library, dim):
    x = torch.randn(2, 3, 5)
    torch.testing.assert_close(library.softmax.softmax(x, dim), torch.softmax(x, dim))
    moved = x.movedim(-1, dim)  # its elements along dim lie side by side
    before = len(run(library, "softmax"))
    torch.testing.assert_close(library.softmax.softmax(moved, dim), torch.softmax(moved, dim))
    assert len(run(library, "softmax")) == before + 1


def test_softmax_refuses_a_dimension_that_is_not_there_as_torch_does(library):
    with pytest.raises(IndexError, match="Dimension out of range"):
        library.softmax.softmax(torch.randn(2, 3), 2)


def test_attention_without_batch_and_with_two(library):
    before = len(run(library, "attention"))
    for shape in [(4, 9, 16), (2, 3, 4, 9, 16)]:
        q = torch.randn(shape)
        found = library.attention.attention(q, q, q, is_causal=True)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, q, q, is_causal=True))
    assert len(run(library, "attention")) == before + 2


def test_attention_over_other_lengths_is_torchs(library):
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 4, 9, 16)
    before = len(run(library, "attention"))
    found = library.attention.attention(q, k, k, is_causal=True)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, k, is_causal=True))
    assert len(run(library, "attention")) == before


def test_cross_entropy_of_images_and_of_one_row(library):
    rows = torch.randn(2, 6, 7)
    target = torch.randint(7, (2, 6))
    one = library.cross_entropy.cross_entropy
    before = len(run(library, "cross_entropy"))
    torch.testing.assert_close(one(rows.mT, target), F.cross_entropy(rows.mT, target))
    torch.testing.assert_close(
        one(rows[0, 0], target[0, 0]), F.cross_entropy(rows[0, :1], target[0, :1])
    )
    assert len(run(library, "cross_entropy")) == before + 2
    images = torch.randn(2, 7, 3, 4)  # classes far apart: torch's own
    labels = torch.randint(7, (2, 3, 4))
    torch.testing.assert_close(one(images, labels), F.cross_entropy(images, labels))
    shares = torch.softmax(torch.randn(5, 7), -1)
    torch.testing.assert_close(one(rows[0, :5], shares), F.cross_entropy(rows[0, :5], shares))
    assert len(run(library, "cross_entropy")) == before + 2


def test_linear_cross_entropy_of_sequences(library):
    x, weight = torch.randn(2, 3, 5, requires_grad=True), torch.randn(7, 5)
    target = torch.randint(7, (2, 3))
    found = library.linear_cross_entropy.linear_cross_entropy(x, weight, target)
    expected = F.cross_entropy((x @ weight.T).flatten(0, 1), target.flatten())
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x) for y in (found, expected)))


@pytest.mark.parametrize("task", TASKS)
def test_tensors_that_are_not_contiguous(library, task):
    function, args, torchs = functions(library)[task]
    turned = [a.mT.contiguous().mT for a in args]
    assert not any(t.is_contiguous() for t in turned)
    torch.testing.assert_close(function(*turned), torchs(*args))
    ours, theirs = leaves(args), leaves(args)
    a, b = (f(*(t.mT.mT for t in own)) for f, own in ((function, ours), (torchs, theirs)))
    grown = torch.randn(a.shape).mT.contiguous().mT if a.dim() > 1 else torch.tensor(2.0)
    torch.testing.assert_close(
        torch.autograd.grad(a, ours, grown), torch.autograd.grad(b, theirs, grown),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_empty_tensors(library, task):
    function, args, torchs = functions(library)[task]
    if task == "attention":
        args = tuple(a[:0] for a in args)
    elif "cross_entropy" in task:
        module = getattr(library, task)
        rest = (torch.empty(0, 7),) if task == "cross_entropy" else (torch.empty(0, 7), args[1])
        loss = getattr(module, task)(*leaves(rest), torch.empty(0, dtype=torch.int64))
        assert loss.isnan()  # as torch has it
        loss.backward()
        return
    else:
        args = (args[0][:0],)
    ours = leaves(args)
    found = function(*ours)
    assert found.shape == torchs(*args).shape
    found.sum().backward()
    assert ours[0].grad.shape == args[0].shape


def test_a_result_is_contiguous_whoever_computes_it(library):
    for dtype in (torch.float32, torch.float64):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.randn(4, 6, dtype=dtype).T
            assert library.gelu.gelu(x).is_contiguous()
            q = torch.randn(1, 2, 4, 8, dtype=dtype).transpose(1, 2)
            assert library.attention._attention.op(q, q, q, False).is_contiguous()


# -- what torch does with an operator --------------------------------------------------------------


def raw(library, dtype=torch.float32):
    """Operators of torch.library with arguments that ask for gradients."""
    target = torch.tensor([3, -100, 0, 6, 2])
    x, weight = leaves((torch.randn(5, 7), torch.randn(7, 7)), dtype)
    q, k, v = leaves((torch.randn(1, 4, 3, 8), *torch.randn(2, 1, 2, 3, 8)), dtype)
    return {
        "gelu": (library.gelu._gelu.op, (x,)),
        "softmax": (library.softmax._softmax.op, (x,)),
        "attention": (library.attention._attention.op, (q, k, v, True)),
        "cross_entropy": (library.cross_entropy._cross_entropy.op, (x, target, -100)),
        "linear_cross_entropy": (
            library.linear_cross_entropy._linear_cross_entropy.op,
            (x, weight, target, -100),
        ),
    }


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("task", TASKS)
def test_opcheck(library, trained, task):
    for one in (library, trained):
        op, args = raw(one)[task]
        torch.library.opcheck(op, args)
        torch.library.opcheck(
            op, tuple(torch.detach(a) if isinstance(a, torch.Tensor) else a for a in args)
        )


@pytest.mark.parametrize("task", ["gelu", "softmax", "attention"])
def test_opcheck_of_the_backward_operators(trained, task):
    shape = (1, 2, 3, 8) if task == "attention" else (3, 8)
    tensors = [torch.randn(shape) for _ in range(5 if task == "attention" else 2)]
    args = (*tensors, torch.rand(1, 2, 3), True) if task == "attention" else tensors
    torch.library.opcheck(getattr(trained, task)._gradient.op, tuple(args))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.filterwarnings("ignore:.*torch's own implementation is used.*")
def test_gradcheck_and_second_derivatives_in_float64(library, task):
    function, args, _ = functions(library)[task]
    doubles = leaves(args, torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.autograd.gradcheck(function, doubles, fast_mode=True)
        if task in ("gelu", "softmax"):
            assert torch.autograd.gradgradcheck(function, doubles, fast_mode=True)


@pytest.mark.parametrize("task", ["gelu", "softmax", "attention"])
def test_second_derivatives_do_not_go_through_a_backward_kernel(trained, task):
    function, args, torchs = functions(trained)[task]

    def second(f, own):
        (first, *_) = torch.autograd.grad(f(*own).square().sum(), own, create_graph=True)
        return torch.autograd.grad(first.square().sum(), own)

    with sdpa_kernel(SDPBackend.MATH):  # torch's other attentions have no second derivative
        found, expected = second(function, leaves(args)), second(torchs, leaves(args))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("task", TASKS)
def test_torch_compile_takes_it_whole_and_with_dynamic_shapes(trained, task):
    torch.compiler.reset()
    function, args, torchs = functions(trained)[task]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    kernel = "attention_train" if task == "attention" else task
    before = len(run(trained, kernel))
    for scale in (1, 2):
        if "cross" in task:
            grown = args  # the target's length is the function's
        else:
            grown = tuple(a.repeat(*(1,) * (a.dim() - 2), scale, 1) for a in args)
        ours, theirs = leaves(grown), leaves(grown)
        a, b = compiled(*ours), torchs(*theirs)
        torch.testing.assert_close(a, b)
        found, expected = (
            torch.autograd.grad(y.square().sum(), own) for y, own in ((a, ours), (b, theirs))
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(run(trained, kernel)) == before + 2


@pytest.mark.nightly
def test_inductor_compiles_a_model_of_all(trained):
    torch.compiler.reset()
    lib = trained

    def model(x, weight, target):
        h = lib.gelu.gelu(x @ weight)
        q = h.view(2, 4, 3, 8)
        h = h + lib.attention.attention(q, q, q, is_causal=True).view(h.shape)
        h = lib.softmax.softmax(h, -1)
        loss = lib.linear_cross_entropy.linear_cross_entropy(h, weight, target)
        return loss + lib.cross_entropy.cross_entropy(h @ weight, target)

    args = (torch.randn(24, 8), torch.randn(8, 8))
    target = torch.randint(8, (24,))
    ours, theirs = leaves(args), leaves(args)
    a = torch.compile(model, fullgraph=True)(*ours, target)
    b = model(*theirs, target)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(
        torch.autograd.grad(a, ours), torch.autograd.grad(b, theirs), rtol=1e-4, atol=1e-5
    )


def compiled_targets(function, args):
    """What a compiled function calls in its forward pass, and the function."""
    called = []

    def note(graph, _):
        called.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend=note)
    return compiled(*args), called


@pytest.mark.parametrize("task", ["attention", "cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("known", [True, False])
def test_what_no_kernel_is_for_is_compiled_as_torchs(tmp_path, task, known):
    """And an exported program keeps the operator: it may run elsewhere."""
    name = f"compiled_{task}_{known}"
    package = assemble(tmp_path / "lib", name, (task,))
    changes = {} if known else {"capabilities": ["x86_64-v9"]}
    package.add_kernel(task, KERNELS[task], **changes)
    if task == "attention":
        for each in ("attention_train", "attention_backward"):
            package.add_kernel(each, BACKWARD[each], **changes)
    library = package.imported(f"{name}_library")
    tensors = {
        "attention": torch.randn(3, 1, 2, 5, 16).unbind(),
        "cross_entropy": (torch.randn(8, 24),),
        "linear_cross_entropy": (torch.randn(8, 16), torch.randn(24, 16)),
    }[task]
    target = () if task == "attention" else (torch.randint(24, (8,)),)
    function = getattr(getattr(library, task), task)
    learning = leaves(tensors)
    with warnings.catch_warnings(record=True) as told:
        warnings.filterwarnings("always", message=".*torch's own implementation is used.*")
        found, called = compiled_targets(lambda *a: function(*a, *target), learning)
    assert any(name in c for c in called) == known
    assert known or "nothing was measured on" in str(told[0].message)
    torch.testing.assert_close(found, function(*learning, *target))

    class Model(nn.Module):
        def forward(self, *args):
            return function(*args, *target)

    with warnings.catch_warnings(record=True):
        exported = torch.export.export(Model(), learning)
    assert name in exported.graph_module.code


def test_attention_of_tensors_that_would_be_copied_is_torchs(trained):
    q = torch.randn(1, 5, 2, 16).transpose(1, 2)
    whole = q.contiguous()
    for learns in (False, True):
        before = [len(run(trained, t)) for t in ("attention", "attention_train")]
        found = trained.attention.attention(q.requires_grad_(learns), whole, whole)
        assert found.stride() == F.scaled_dot_product_attention(q, whole, whole).stride()
        assert [len(run(trained, t)) for t in ("attention", "attention_train")] == before


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_keeps_the_operators(library, monkeypatch, strict):
    class Model(nn.Module):
        def forward(self, x):
            return library.softmax.softmax(library.gelu.gelu(x))

    rows = {"dynamic_shapes": ({0: torch.export.Dim("rows", max=100_000)},)}
    for least in (0, 40):  # of some elements kernels are measured; a program takes any number
        for module in (library.softmax, library.gelu):
            operator = vars(module)[f"_{module.__name__.rpartition('.')[2]}"]
            monkeypatch.setattr(operator, "least", least)
        program = torch.export.export(Model(), (torch.randn(4, 8),), strict=strict, **rows)
        called = [str(n.target) for n in program.graph.nodes if n.op == "call_function"]
        assert called == ["forward_ops.gelu.default", "forward_ops.softmax.default"]
        for x in (torch.randn(3, 8), torch.randn(7, 8)):
            torch.testing.assert_close(program.module()(x), Model()(x))


@pytest.mark.parametrize("task", TASKS)
def test_modes_see_the_operator(library, task):
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return func(*args, **(kwargs or {}))

    op, args = raw(library)[task]
    with Watch(), torch.no_grad():
        op(*args)
    assert seen == [f"forward_ops::{task}"]


@pytest.mark.parametrize("task", TASKS)
def test_inference_mode(library, task):
    function, args, torchs = functions(library)[task]
    with torch.inference_mode():
        torch.testing.assert_close(function(*args), torchs(*args))


@pytest.mark.parametrize("task", TASKS)
def test_autocast_gives_torchs_dtype_and_values(library, task):
    function, args, torchs = functions(library)[task]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [a.to(dtype) for a in args]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ours, theirs = function(*inputs), torchs(*inputs)
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)
        own = leaves(inputs)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = function(*own)
        loss.float().sum().backward()
        assert all(t.grad.dtype == dtype for t in own)


def test_autocast_does_not_reach_into_an_operator(library):
    x = torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        op = library.linear_cross_entropy._linear_cross_entropy.op
        loss, dx, _ = op(x, torch.randn(8, 8), torch.zeros(4, dtype=torch.int64), -100)
    assert loss.dtype == dx.dtype == torch.float32


@pytest.mark.parametrize("task", ["gelu", "softmax", "attention"])
def test_vmap(library, task):
    function, args, torchs = functions(library)[task]
    batched = tuple(torch.stack([a, a + 1, a - 1]) for a in args)
    torch.testing.assert_close(torch.vmap(function)(*batched), torch.vmap(torchs)(*batched))
    last = tuple(b.movedim(0, -1) for b in batched)
    torch.testing.assert_close(
        torch.vmap(function, in_dims=-1)(*last), torch.vmap(torchs)(*batched)
    )
    if task == "attention":
        found = torch.vmap(function, in_dims=(0, None, None))(batched[0], *args[1:])
        torch.testing.assert_close(
            found,
            torchs(batched[0].flatten(0, 1), *(a.repeat(3, 1, 1, 1) for a in args[1:])).view(
                found.shape
            ),
        )


class Tagged(torch.Tensor):
    """A subclass that torch's own operators carry on."""


@pytest.mark.parametrize("task", TASKS)
def test_subclasses_and_meta_tensors(library, task):
    function, args, torchs = functions(library)[task]
    before = len(run(library, task))
    found = function(*(a.as_subclass(Tagged) for a in args))
    assert isinstance(found, Tagged)
    torch.testing.assert_close(found.as_subclass(torch.Tensor), torchs(*args))
    if task in ("gelu", "softmax", "attention"):
        assert function(*(a.to("meta") for a in args)).shape == torchs(*args).shape
    assert len(run(library, task)) == before


def test_sparse_tensors_go_to_torch(library):
    x = torch.eye(3).to_sparse()
    with pytest.raises(NotImplementedError, match="Sparse"):
        library.gelu.gelu(x)


def test_integers_are_torchs_to_refuse(library):
    with (
        pytest.warns(UserWarning, match="torch's own implementation is used.*not int64"),
        pytest.raises(RuntimeError, match="not implemented for 'Long'"),
    ):
        library.softmax.softmax(torch.arange(6).view(2, 3))


# -- modules and layers ----------------------------------------------------------------------------


def test_modules_are_the_functions(library):
    x, target = torch.randn(5, 7), torch.randint(7, (5,))
    q = torch.randn(1, 2, 3, 8)
    torch.testing.assert_close(library.gelu.GELU()(x), F.gelu(x, approximate="tanh"))
    torch.testing.assert_close(library.softmax.Softmax(0)(x), torch.softmax(x, 0))
    torch.testing.assert_close(
        library.attention.Attention(is_causal=True)(q, q, q),
        F.scaled_dot_product_attention(q, q, q, is_causal=True),
    )
    torch.testing.assert_close(
        library.cross_entropy.CrossEntropyLoss(ignore_index=3)(x, target),
        F.cross_entropy(x, target, ignore_index=3),
    )
    fused = library.linear_cross_entropy.FusedLinearCrossEntropyLoss(ignore_index=3)
    weight = torch.randn(9, 7)
    torch.testing.assert_close(
        fused(weight, x, target), F.cross_entropy(x @ weight.T, target, ignore_index=3)
    )
    with pytest.raises(ValueError, match="a bias is not supported"):
        fused(weight, x, target, torch.zeros(9))
    assert "dim=0" in repr(library.softmax.Softmax(0))


@pytest.mark.parametrize("task", TASKS)
def test_layers_keep_the_rules_of_hugging_face_kernels(library, task):
    """`_validate_layer` of kernels 0.17: no constructor, no members but two flags."""
    layers = getattr(library, task).LAYERS
    allowed = {n for n, _ in inspect.getmembers(nn.Module)} | {"can_torch_compile", "has_backward"}
    for layer in layers.values():
        assert layer.__init__ is nn.Module.__init__
        assert {n for n, _ in inspect.getmembers(layer)} <= allowed
        assert layer.can_torch_compile


@pytest.mark.parametrize(
    ("task", "layer", "replaced"),
    [
        ("gelu", "GELU", nn.GELU),
        ("softmax", "Softmax", nn.Softmax),
        ("cross_entropy", "CrossEntropyLoss", nn.CrossEntropyLoss),
    ],
)
def test_layers_have_the_forward_that_they_replace(library, task, layer, replaced):
    ours, theirs = (
        inspect.signature(c.forward).parameters.values()
        for c in (getattr(library, task).LAYERS[layer], replaced)
    )
    assert [p.kind for p in ours] == [p.kind for p in theirs]


def test_layers_respect_the_module_that_they_replace(library):
    x, target = torch.randn(5, 7), torch.randint(7, (5,))
    q = torch.randn(1, 2, 3, 8)
    mask = torch.rand(3, 3) > 0.2
    mask.fill_diagonal_(fill_value=True)
    ce = (library.cross_entropy, "CrossEntropyLoss")
    modules = [
        (library.gelu, "GELU", nn.GELU(), (x,)),
        (library.gelu, "GELU", nn.GELU(approximate="tanh"), (x,)),
        (library.softmax, "Softmax", nn.Softmax(0), (x,)),
        (*ce, nn.CrossEntropyLoss(ignore_index=2), (x, target)),
        (*ce, nn.CrossEntropyLoss(label_smoothing=0.1), (x, target)),
        (*ce, nn.CrossEntropyLoss(reduction="sum"), (x, target)),
    ]
    for module, layer, replaced, args in modules:
        found = module.LAYERS[layer].forward(replaced, *args)
        torch.testing.assert_close(found, replaced(*args))
    sdpa = library.attention.LAYERS["ScaledDotProductAttention"].forward
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}):
        expected = F.scaled_dot_product_attention(q, q, q, **options)
        torch.testing.assert_close(sdpa(nn.Module(), q, q, q, **options), expected)


def test_two_copies_of_a_library_live_side_by_side(tmp_path):
    found = []
    for number in (1, 2):
        package = assemble(tmp_path / f"copy{number}", "twice_ops", ("gelu",))
        package.add_kernel("gelu", KERNELS["gelu"])
        found.append(package.imported(f"twice_copy{number}"))
    x = torch.randn(3, 4)
    for one in found:
        torch.testing.assert_close(one.gelu.gelu(x), F.gelu(x, approximate="tanh"))
        assert run(one, "gelu") == [(3, 4)]
    names = [m.gelu._gelu.op.name() for m in found]
    assert names == ["twice_ops::gelu", "twice_ops_2::gelu"]


def test_all_names_are_said(library):
    for task, name in itertools.product(TASKS, ("__all__", "LAYERS", "__doc__")):
        assert vars(getattr(library, task))[name]
