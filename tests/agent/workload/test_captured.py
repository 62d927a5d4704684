"""Regions in a model's graphs: found, replaced in both directions, left where they differ."""

import pytest
import torch
import torch.nn.functional as F
from kagent.workload import captured
from kagent.workload.captured import Pattern, capture, release, substitute
from torch import nn

aten = torch.ops.aten


def forward(*, x0):
    mul = aten.mul.Tensor(x0, 0.5)
    softmax = aten._softmax.default(mul, -1, False)
    gelu = aten.gelu.default(softmax, approximate="tanh")
    return softmax, gelu


def backward(*, x0, x1):
    gelu = aten.gelu_backward.default(x0, x1, approximate="tanh")
    softmax = aten._softmax_backward_data.default(gelu, x1, -1, torch.float32)
    return aten.mul.Tensor(softmax, 0.5)


def part_of_forward(*, x0):
    return aten._softmax.default(aten.mul.Tensor(x0, 0.5), -1, False)


def other_constant(*, x0):
    return aten._softmax.default(aten.mul.Tensor(x0, 0.25), -1, False)


def viewed(*, x0):
    size = x0.shape[0]
    return aten.view.default(aten.mul.Tensor(x0, 2.0), [size * 8])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        p = F.softmax(self.up(x) * 0.5, dim=-1)
        return x + self.down(F.gelu(p, approximate="tanh"))


@pytest.fixture
def model():
    torch._dynamo.reset()
    torch.manual_seed(0)
    captured.GRAPHS.clear()
    captured.COMPILED.clear()
    yield nn.Sequential(Model(), Model())
    release()


def gradients(call, x, model=None):
    model = model if model is not None else call
    model.zero_grad()
    loss = call(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def sites(*functions):
    """Sites whose calls are counted, and the counts."""
    counts = {f.__name__: 0 for f in functions}

    def counted(function):
        region = Pattern(function.__name__, function)
        inner = region.call(function)

        def call(*tensors):
            counts[function.__name__] += 1
            return inner(*tensors)

        return region, call

    return {f.__name__: counted(f) for f in functions}, counts


def test_both_directions_are_replaced_and_give_the_same(model):
    x = torch.randn(4, 8)
    plain = gradients(model, x)
    found, counts = sites(part_of_forward, forward, backward, other_constant)
    capture(found)
    replaced = gradients(model, x)
    assert counts == {"part_of_forward": 0, "forward": 2, "backward": 2, "other_constant": 0}
    assert all(map(torch.equal, plain, replaced))
    capture({})
    assert all(map(torch.equal, plain, gradients(model, x)))
    release()
    gradients(model, x)
    assert counts["forward"] == 2
    assert {g.split()[0] for g in captured.GRAPHS} == {"training"}


@pytest.fixture(scope="module")
def own_code(tmp_path_factory):
    """A folder of compiled code that nobody else writes to, who may be killed in the middle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["module", "in place", "function"])
def test_the_program_compiles_by_itself(model, way, own_code):
    model, x = model[:1], torch.randn(4, 8)
    plain = gradients(model, x)
    found, counts = sites(forward, backward)
    captured.prepare([None, ("inductor", [region for region, _ in found.values()])])
    call = model
    if way == "in place":
        model.compile()
    else:
        call = torch.compile(model if way == "module" else lambda x: model(x) * 1)
    for _ in range(2):
        release()
        assert all(map(close, plain, gradients(call, x, model)))
        capture(found, "inductor")
        assert all(map(close, plain, gradients(call, x, model)))
    assert counts == {"forward": 2, "backward": 2}
    assert len(captured.COMPILED) == 1
    assert not captured.GRAPHS


class Dropped(nn.Module):
    """Random numbers, a constant, a buffer, and a size that is used as a number."""

    def __init__(self):
        super().__init__()
        self.model = Model()
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x):
        shift = torch.tensor([1.0, 2.0] * 4)
        return F.dropout(self.model(x), 0.5) * self.scale + shift * x.shape[0]


def seeded(model, x):
    torch.manual_seed(1)
    return gradients(model, x)


@pytest.mark.nightly
def test_the_rest_goes_through_inductor(model):
    model, x = Dropped(), torch.randn(4, 8)
    plain = seeded(model, x)
    found, counts = sites(part_of_forward, forward, backward)
    capture(found, "inductor")
    assert all(map(close, plain, seeded(model, x)))
    assert counts == {"part_of_forward": 0, "forward": 1, "backward": 1}


@pytest.mark.nightly
def test_shapes_beyond_the_bound_run_as_they_are(model, monkeypatch):
    monkeypatch.setattr(captured, "SHAPES", 2)
    captured.NOTES.clear()
    found, counts = sites(forward, backward)
    inputs = [torch.randn(n, 8) for n in (3, 4, 5, 3)]
    plain = [gradients(model, x) for x in inputs]
    capture(found)
    with pytest.warns(UserWarning, match="Sequential was called with more than 2 kinds of arg"):
        replaced = [gradients(model, x) for x in inputs]
    for ours, own in zip(replaced, plain, strict=True):
        assert all(map(torch.equal, ours, own))
    assert counts == {"forward": 6, "backward": 6}  # of two blocks: not the third shape
    assert len(captured.NOTES) == 1
    capture({})
    assert all(map(torch.equal, plain[2], gradients(model, inputs[2])))  # counted anew


@pytest.mark.nightly
def test_shapes_that_the_programs_compiler_takes_as_one(model):
    found, counts = sites(forward, backward)
    capture(found)
    model = model[0]
    compiled = torch.compile(model, dynamic=True)
    for n in (4, 5, 6):
        x = torch.randn(n, 8)
        ours = gradients(compiled, x)
        assert all(map(close, ours, gradients_of_forward(model, x)))
    assert counts == {"forward": 3, "backward": 3}
    assert len(captured.COMPILED) == 1


def gradients_of_forward(model, x):
    """Loss and gradients of the module's own operations: only calls of it are captured."""
    p = F.softmax(F.linear(x, model.up.weight, model.up.bias) * 0.5, dim=-1)
    out = x + F.linear(F.gelu(p, approximate="tanh"), model.down.weight, model.down.bias)
    loss = out.square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def close(a, b):
    return torch.allclose(a, b, atol=1e-6)


def test_inference_is_replaced_and_random_numbers_stay(model):
    def relu(*, x0):
        return aten.relu.default(aten.mul.Tensor(x0, 0.5))

    class Noisy(nn.Module):
        def forward(self, x):
            noise = F.dropout(x, 0.5)
            return F.relu(x * 0.5) + noise, F.dropout(x, 0.5)

    x, dropped = torch.randn(4, 8), Noisy()
    torch.manual_seed(1)
    wanted = dropped(x)
    found, counts = sites(relu)
    for mode in (torch.no_grad, torch.inference_mode):
        capture(found)
        with mode():
            torch.manual_seed(1)
            assert all(map(torch.equal, wanted, dropped(x)))
        release()
    assert counts["relu"] == 2
    assert "forward" not in vars(dropped)


def graph_of(function, *inputs):
    return torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*inputs)


def test_sizes_that_a_region_computes_are_compared():
    x = torch.randn(3, 8)
    region = Pattern("viewed", viewed)
    same = graph_of(lambda a: (a * 2.0).view(24), x)
    assert substitute(same.graph, region, region.call(viewed)) == 1
    same.recompile()
    assert torch.equal(same(x), (x * 2).view(24))
    other = graph_of(lambda a: (a * 2.0).view(4, 6), x)
    assert substitute(other.graph, region, region.call(viewed)) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda a: (m := a * 0.5, m.softmax(-1)),  # the product is used elsewhere
        lambda a: (a * 0.5).softmax(0),
        lambda a: (a.double() * 0.5).softmax(-1, torch.float32),
    ],
)
def test_what_is_not_the_region_stays(function):
    def region(x0):
        return aten._softmax.default(aten.mul.Tensor(x0, 0.5), -1, False)

    graph = graph_of(function, torch.randn(3, 8))
    assert substitute(graph.graph, Pattern("region", region), region) == 0


def test_results_that_are_not_contiguous_stay():
    def region(x0):
        return aten.exp.default(aten.mul.Tensor(x0, 0.5))

    graph = graph_of(lambda a: ((a.mT * 0.5).exp(), (a * 0.5).exp()), torch.randn(3, 8))
    assert substitute(graph.graph, Pattern("region", region), region) == 1


def test_a_region_with_something_between_its_ends_stays():
    def region(x0, x1):
        half = aten.mul.Tensor(x0, 0.5)
        return half, aten.add.Tensor(x1, half)

    graph = graph_of(lambda a: (h := a * 0.5, h.sin() + h), torch.randn(3, 8))
    assert substitute(graph.graph, Pattern("region", region), region) == 0


def test_a_function_that_is_no_region():
    with pytest.raises(ValueError, match="no ATen operation"):
        Pattern("r", lambda x: aten.mul.Tensor(torch.tanh(x), 2.0))
