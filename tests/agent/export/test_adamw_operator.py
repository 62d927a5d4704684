"""AdamW over many tensors: layers go to the kernel, all else to torch, with torch's results."""

import pytest
import torch
from kagent_sandbox.data.task import load_task
from library_package import SEEDS, assemble, calls

KERNEL = """
import torch
CALLS = []
def adamw_tensors(*args):
    tensors, (lr, step, b1, b2, eps, decay) = args[:16], args[16:]
    CALLS.append(tuple(tensors[0].shape))
    for i in range(4):
        p, g, m, v = tensors[i::4]
        m.lerp_(g.float(), 1 - b1)
        v.lerp_(g.float() ** 2, 1 - b2)
        root = (v / (1 - b2**step)).sqrt() + eps
        p.copy_(p.float() * (1 - lr * decay * (i < 2)) - lr * (m / (1 - b1**step)) / root)
"""
SHAPES = [(6, 4), (4, 4), (4,), (6,), (4, 4), (5, 4), (4,), (5,), (2, 3, 4), (4, 6), ()]
"""Two layers of four tensors each; the last three are in none."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adamw") / "lib"
    package = assemble(folder, "adamw_ops", ("adamw_tensors",))
    package.add_kernel("adamw_tensors", KERNEL)
    return package.imported("adamw_library")


def drawn(dtype=torch.float32):
    torch.manual_seed(0)
    params, grads = ([torch.randn(s, dtype=dtype) for s in SHAPES] for _ in range(2))
    moments = [[torch.zeros(s) for s in SHAPES] for _ in range(2)]
    return params, grads, *moments


def scalars(step):
    return {"lr": torch.tensor(0.01), "step": torch.tensor(float(step))}


def test_it_steps_as_torchs_optimiser_does(library):
    params, grads, exp_avgs, exp_avg_sqs = drawn()
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    decays = [p for p in theirs if p.dim() > 1]
    others = [p for p in theirs if p.dim() < 2]
    optimiser = torch.optim.AdamW(
        [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=0.01
    )
    before = len(calls(library, "adamw_tensors"))
    for step in (1, 2, 3):
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g * step
        optimiser.step()
        own = [g * step for g in grads]
        library.adamw_tensors.fused_adamw(params, own, exp_avgs, exp_avg_sqs, **scalars(step))
    torch.testing.assert_close(params, [p.detach() for p in theirs])
    assert calls(library, "adamw_tensors")[before:] == [(6, 4), (5, 4)] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_that_kernels_do_not_know_go_to_torch(library, dtype):
    before = len(calls(library, "adamw_tensors"))
    with_kernel, by_torch = drawn(dtype), drawn(dtype)
    library.adamw_tensors.fused_adamw(*with_kernel, **scalars(3))
    assert len(calls(library, "adamw_tensors")) == before + 2
    library.adamw_tensors.fused_adamw(*by_torch, **scalars(3), weight_decay=0.1 + 1e-9)
    assert len(calls(library, "adamw_tensors")) == before + 2
    for ours, torchs in zip(with_kernel, by_torch, strict=True):
        torch.testing.assert_close(ours, torchs)


@pytest.mark.filterwarnings("ignore:.*torch's own implementation is used.*")
def test_parameters_of_float64_are_stepped_in_float64(library):
    params, grads, *moments = drawn(torch.float64)
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    decays = [p for p in theirs if p.dim() > 1]
    others = [p for p in theirs if p.dim() < 2]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=float(torch.tensor(0.01)))
    moments = [[m.double() for m in each] for each in moments]
    for p, g in zip(theirs, grads, strict=True):
        p.grad = g
    optimiser.step()
    library.adamw_tensors.fused_adamw(params, grads, *moments, **scalars(1))
    torch.testing.assert_close(params, [p.detach() for p in theirs], rtol=1e-12, atol=1e-12)


def names_of(task):
    return [a.name for a in task.arguments]


def test_a_layer_agrees_with_the_tasks_eager_and_passes_opcheck(library):
    task = load_task(SEEDS / "adamw_tensors")
    reference, case = task.reference(), task.cpu.check[0]
    tensors = reference.inputs(case, torch.Generator().manual_seed(1), torch.device("cpu"))
    values = [task.scalar(a, case) for a in task.arguments if a.shape is None]
    args = [tensors[a.name] for a in task.arguments if a.shape is not None] + values
    expected = {n: t.clone() for n, t in tensors.items()}
    names = dict(zip([a.name for a in task.arguments if a.shape is None], values, strict=True))
    reference.eager(**expected, **names)
    module = library.adamw_tensors
    torch.library.opcheck(module._adamw_tensors.op, tuple(args))
    by_torch = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    module._reference(*by_torch)
    module.adamw_tensors(*args)
    for found in (by_torch, args):
        torch.testing.assert_close(dict(zip(names_of(task), found, strict=True)), expected | names)


def test_lists_of_different_lengths_and_gradients_are_refused(library):
    params, *rest = drawn()
    fused = library.adamw_tensors.fused_adamw
    with pytest.raises(ValueError, match="was given 10, 11, 11, 11"):
        fused(params[:-1], *rest, **scalars(1))
    for one in (0, 10):  # in a layer, and alone
        wanted = [p.requires_grad_() if i == one else p for i, p in enumerate(drawn()[0])]
        with pytest.raises(NotImplementedError, match="no gradient"):
            fused(wanted, *rest, **scalars(1))
        with torch.no_grad():
            fused(wanted, *rest, **scalars(1))


WRITES_MEMORY = """
CALLS = []
def adamw_tensors(*args):
    CALLS.append(tuple(args[0].shape))
    for tensor in args[:16]:
        tensor.numpy()[...] += 1.0
"""


def test_a_graph_that_has_saved_what_a_kernel_writes_over_is_refused(tmp_path):
    """Torch cannot see what a kernel writes: the first call is on copies, the next is not."""
    package = assemble(tmp_path / "lib", "adamw_raw", ("adamw_tensors",))
    package.add_kernel("adamw_tensors", WRITES_MEMORY)
    library = package.imported("adamw_raw_library")
    params, *rest = drawn()
    weight = params[0].requires_grad_()
    for _ in range(3):
        loss = (weight * weight).sum()
        with torch.no_grad():
            library.adamw_tensors.fused_adamw(params, *rest, **scalars(1))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():  # tensors of it have no versions
        tensors = drawn()
        library.adamw_tensors.fused_adamw(*tensors, **scalars(1))
    assert len(calls(library, "adamw_tensors")) == 8
