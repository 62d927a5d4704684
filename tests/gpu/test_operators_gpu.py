"""Exported operators on the device at hand, with the tasks' seeds as their kernels."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from library_package import SEEDS, assemble

pytestmark = pytest.mark.gpu

FILES = {
    "gelu": "triton_flat.py",
    "softmax": "triton_rows.py",
    "attention": "triton_flash.py",
    "cross_entropy": "triton_onchip.py",
    "linear_cross_entropy": "triton_chunked.py",
}
CUDA_FILES = {
    "gelu": "cuda_vector.py",
    "softmax": "cuda_cluster.py",
    "attention": "cuda_flash.py",
    "cross_entropy": "cuda_cluster.py",
    "linear_cross_entropy": "cuda_rows.py",
}
LOSSES = ("cross_entropy", "linear_cross_entropy")


def made(folder, name, files):
    device = torch.device("cuda", 0)
    package = assemble(folder, f"{name}_ops", tuple(files), device)
    for task, file in files.items():
        package.add_kernel(task, (SEEDS / task / file).read_text(), language=file.split("_")[0])
    return package.imported(f"{name}_library")


@pytest.fixture(scope="module", params=["triton", "cuda"])
def library(request, tmp_path_factory):
    files = FILES if request.param == "triton" else CUDA_FILES
    return made(tmp_path_factory.mktemp(request.param) / "lib", f"{request.param}_gpu", files)


@pytest.fixture(autouse=True)
def _no_fallbacks():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch's own implementation is used.*")
        yield


def functions(library, dtype=torch.bfloat16):
    def draw(*shape):
        return torch.randn(shape, device="cuda", dtype=dtype)

    target = torch.randint(1024, (512,), device="cuda")
    target[::5] = -100
    return {
        "gelu": (library.gelu.gelu, (draw(512, 1024),), lambda a: F.gelu(a, approximate="tanh")),
        "softmax": (library.softmax.softmax, (draw(512, 1024),), lambda a: torch.softmax(a, -1)),
        "attention": (
            lambda q, k, v: library.attention.attention(q, k, v, is_causal=True),
            (draw(2, 4, 256, 64), draw(2, 4, 256, 64), draw(2, 4, 256, 64)),
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        ),
        "cross_entropy": (
            lambda a: library.cross_entropy.cross_entropy(a, target),
            (draw(512, 1024),),
            lambda a: F.cross_entropy(a.float(), target),
        ),
        "linear_cross_entropy": (
            lambda a, w: library.linear_cross_entropy.linear_cross_entropy(a, w, target),
            (draw(512, 256), draw(1024, 256) * 0.1),
            lambda a, w: F.cross_entropy((a @ w.T).float(), target),
        ),
    }


def leaves(tensors):
    return tuple(t.detach().clone().requires_grad_() for t in tensors)


def used(library, task):
    return [c for c in vars(vars(library)[task])[f"_{task}"]._calls.values() if c is not None]


@pytest.mark.parametrize("task", FILES)
def test_values_and_gradients_are_torchs_and_the_kernels_ran(library, task):
    function, args, torchs = functions(library)[task]
    ours, theirs = leaves(args), leaves(args)
    if task == "attention":  # its kernels are not used in training without a backward kernel
        torch.testing.assert_close(function(*args), torchs(*args), rtol=0.03, atol=0.03)
    a, b = function(*ours), torchs(*theirs)
    torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.02)
    found = torch.autograd.grad(a.float().square().sum(), ours)
    expected = torch.autograd.grad(b.float().square().sum(), theirs)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).float().norm() <= 0.02 * y.float().norm()
    assert used(library, task)


# Without gradients linear cross entropy asks no kernel; with them, and without a backward kernel,
# attention does not.
KNOWN = [("linear_cross_entropy", True), ("attention", False)]
KNOWN += [(task, learns) for task in set(FILES) - dict(KNOWN).keys() for learns in (False, True)]


@pytest.mark.parametrize(("task", "learns"), sorted(KNOWN))
def test_a_known_call_does_not_pass_the_dispatcher(library, task, learns, monkeypatch):
    function, args, _ = functions(library)[task]
    args = leaves(args) if learns else args
    expected = function(*args)
    operator = vars(vars(library)[task])[f"_{task}"]

    def refuse(*_):
        raise AssertionError("the dispatcher was asked")

    monkeypatch.setattr(operator, "op", refuse)
    torch.testing.assert_close(function(*args), expected)


@pytest.mark.parametrize("task", FILES)
def test_opcheck(library, task):
    function, args, _ = functions(library)[task]
    operator = vars(vars(library)[task])[f"_{task}"]
    target = torch.randint(args[-1].shape[0], (args[0].shape[0],), device="cuda")
    more = {
        "attention": (True,),
        "cross_entropy": (torch.randint(1024, (512,), device="cuda"), -100),
        "linear_cross_entropy": (target, -100),
    }
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator.op, (*leaves(args), *more.get(task, ())), test_utils=tests)
    assert function is not None


@pytest.mark.parametrize("task", FILES)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile(library, task, mode):
    torch.compiler.reset()
    function, args, torchs = functions(library)[task]
    compiled = torch.compile(function, fullgraph=True, mode=mode)
    for _ in range(3):
        with torch.no_grad():
            result = compiled(*args).clone()
    torch.testing.assert_close(result.float(), torchs(*args).float(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("task", LOSSES)
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 65536.0])
def test_gradients_are_scaled_in_place_without_waiting_for_the_device(library, task, factor):
    function, args, torchs = functions(library)[task]
    ours, theirs = leaves(args), leaves(args)
    incoming = torch.tensor(factor, device="cuda")
    function(*leaves(args)).backward(incoming)  # compiled, and its choice made
    loss = function(*ours)
    saved = [t.data_ptr() for t in loss.grad_fn.saved_tensors]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.autograd.grad(loss, ours, incoming)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [g.data_ptr() for g in found] == saved
    expected = torch.autograd.grad(torchs(*theirs) * factor, theirs)
    for x, y in zip(found, expected, strict=True):
        assert (x - y).float().norm() <= 0.02 * y.float().norm()


@pytest.mark.parametrize("task", LOSSES)
def test_a_second_backward_is_right(library, task):
    function, args, _ = functions(library)[task]
    own = leaves(args)
    loss = function(*own)
    first = torch.autograd.grad(loss, own, torch.tensor(2.0, device="cuda"), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, own, torch.tensor(4.0, device="cuda"))
    torch.testing.assert_close(list(first), kept)
    torch.testing.assert_close([2 * g for g in first], list(second))


@pytest.mark.parametrize("task", LOSSES)
def test_no_memory_is_taken_for_the_backward_pass(library, task):
    function, args, _ = functions(library)[task]
    own = leaves(args)
    function(*own).backward()
    for leaf in own:
        leaf.grad = None
    loss = function(*own) * 0.5
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss.backward()
    gradients = sum(t.numel() * t.element_size() for t in own)
    assert torch.cuda.max_memory_allocated() - before < gradients / 2


def test_a_training_step_can_be_captured(library):
    function, args, torchs = functions(library)["cross_entropy"]
    (x,) = leaves(args)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(function(x) * 0.5, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = function(x)
        (grad,) = torch.autograd.grad(loss * 0.5, x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    own = x.detach().clone().requires_grad_()
    expected = torchs(own)
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.01)
    (wanted,) = torch.autograd.grad(expected * 0.5, own)
    assert (grad - wanted).float().norm() <= 0.02 * wanted.float().norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_gives_torchs_dtypes(library, dtype):
    for task, (function, args, torchs) in functions(library, torch.float32).items():
        with torch.autocast("cuda", dtype=dtype):
            ours, theirs = function(*args), torchs(*args)
        assert ours.dtype == theirs.dtype, task
        torch.testing.assert_close(ours, theirs, rtol=0.03, atol=0.03)
    with torch.autocast("cuda", dtype=dtype):
        x = torch.randn(8, 64, device="cuda", dtype=dtype)
        assert library.softmax.softmax(x).dtype == torch.softmax(x, -1).dtype == torch.float32
        assert library.gelu.gelu(x).dtype == dtype


def test_tensors_that_begin_anywhere_do_not_fault(library):
    buffer = torch.randn(512 * 1024 + 64, device="cuda", dtype=torch.bfloat16)
    for offset in (1, 3, 8):
        x = buffer[offset : offset + 512 * 1024].view(512, 1024)
        torch.testing.assert_close(library.softmax.softmax(x), torch.softmax(x, -1))
        torch.testing.assert_close(library.gelu.gelu(x), F.gelu(x, approximate="tanh"))
    torch.cuda.synchronize()


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(library):
    x = torch.randn(512, 1024, device="cuda:1", dtype=torch.bfloat16)
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(library.softmax.softmax(x), torch.softmax(x, -1))


def test_autograd_sees_what_a_kernel_writes(tmp_path):
    """The first call of a kind is on copies, the others are not."""
    library = made(tmp_path / "lib", "steps_gpu", {"adamw_tensors": "triton_chunks.py"})
    shapes = [(1024, 512), (512, 512), (512,), (1024,)]
    params, grads = ([torch.randn(s, device="cuda") for s in shapes] for _ in range(2))
    moments = [[torch.zeros(s, device="cuda") for s in shapes] for _ in range(2)]
    lr, step = torch.tensor(0.01, device="cuda"), torch.tensor(1.0, device="cuda")
    weight = params[0].requires_grad_()
    for _ in range(3):
        loss = (weight * weight).sum()
        with torch.no_grad():
            library.adamw_tensors.fused_adamw(params, grads, *moments, lr=lr, step=step)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_in_deterministic_mode_torch_takes_what_atomics_would_order(tmp_path):
    device = torch.device("cuda", 0)
    package = assemble(tmp_path / "lib", "ordered_gpu_ops", ("attention",), device)
    source = (SEEDS / "attention" / "triton_flash.py").read_text()
    package.add_kernel("attention", source, language="triton", repeats=False)
    library = package.imported("ordered_gpu_library")
    q, k, v = torch.randn(3, 2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    library.attention.attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="order of the atomic operations"):
            found = library.attention.attention(q, k, v)
        torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v), rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)
