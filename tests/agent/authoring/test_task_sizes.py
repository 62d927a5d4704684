"""Sizes of a task made of PyTorch code: its dimensions, formulas, and cases."""

import itertools
import tomllib
from dataclasses import replace

import pytest
import sympy
import torch
from kagent.authoring import new_task
from kagent.authoring.draft import cases
from kagent.authoring.draft.cases import make_draft
from kagent.authoring.draft.pointers import with_offsets
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.draft.rooms import bare, find_rooms
from kagent.authoring.draft.toml import task_toml
from kagent.authoring.errors import AuthoringError
from kagent.authoring.tracing import trace as trace_module
from kagent.authoring.tracing.operation import make_operation
from kagent.authoring.tracing.sizes import Room
from kagent.authoring.tracing.source_file import load_module
from kagent_sandbox.data.case import Case
from kagent_sandbox.data.formula import evaluate
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from traced_functions import traced


def test_shapes_are_formulas_and_equalities_are_kept():
    found = traced(F.linear, torch.randn(16, 32), torch.randn(32, 32), torch.randn(32))
    assert found.dims == {"M": 16, "K": 32, "N": 32}
    assert found.shapes == (("M", "K"), ("N", "K"), ("N",))
    assert found.results[0].shape == ("M", "N")
    assert found.products == "2 * K * M * N"
    pooled = traced(lambda x: F.avg_pool1d(x, 3, 2, 1), torch.randn(4, 8, 31))
    assert pooled.results[0].shape == ("B", "C", "((L - 1) // 2) + 1")


def test_a_signature_has_the_dtypes_that_are_not_the_cases():
    def picked(x, i):
        return x[i], i + 1

    found = traced(picked, torch.randn(8, 5), torch.zeros(6).long())
    signature = tomllib.loads(task_toml(bare(found)))["signature"]
    arguments = "x: Tensor[M, N], i: Tensor[K] int64"
    assert signature == f"picked({arguments}) -> (Tensor[K, N], Tensor[K] int64)"


def in_windows(x):
    b, h, w, c = x.shape
    x = x.roll((-3, -3), (1, 2)).view(b, h // 8, 8, w // 8, 8, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 64, c)


def test_sizes_of_quotients_without_a_rest_are_dimensions():
    """Models read the signature: heads in groups had `4 * (M // 4)` in it."""

    def in_groups(q):
        b, h, d = q.shape
        return (q.view(b, 4, h // 4, d) * 2).reshape(b, h, d)

    operation = make_operation(in_groups, torch.randn(3, 24, 8))
    for axes in ([(0, 1)], [(0, 0), (0, 1), (0, 2)]):
        found = trace_module.trace(operation, axes)
        assert found.results[0].shape == found.shapes[0]
    bags = traced(lambda i, w: F.embedding_bag(i, w), torch.zeros(12, 9).int(), torch.randn(50, 8))
    assert bags.results[0].shape == ("M", "P")
    found = trace_module.trace(
        make_operation(in_windows, torch.randn(2, 56, 40, 6)), [(0, 1), (0, 2)]
    )
    assert found.results[0].shape == ("2 * (C // 8) * (H // 8)", 64, 6)
    halves = traced(lambda x: x[::2], torch.randn(15, 8))
    assert halves.results[0].shape == ("(M + 1) // 2", "N")


def test_what_is_read_by_index_costs_what_is_read():
    """The cost of a few rows of a table was that of the whole table, of which none was left over
    for a case.
    """
    found = traced(lambda table, i: table[i] + 1, torch.randn(5000, 8), torch.zeros(16).long())
    assert found.work(found.dims) == 2 * 16 * 8


def test_sizes_of_what_is_padded_vary():
    """torch's C++ code of padding asks for sizes as numbers."""
    found = traced(lambda x: x + F.pad(x, (0, 0, 1, 0))[:, :-1], torch.randn(8, 32, 16))
    assert found.results[0].shape == ("B", "M", "N")
    assert evaluate(found.elements, {"B": 2, "M": 3, "N": 5}) == 2 * 4 * 5 + 2 * 3 * 5


def test_ratios_stay_and_what_cannot_vary_is_fixed():
    heads = make_operation(lambda x: x.view(x.shape[0], -1, 16).softmax(-1), torch.randn(24, 64))
    room = next(find_rooms(heads))
    assert isinstance(room, Room)
    assert room.steps == {"M": 1, "N": 16}
    norm = make_operation(lambda x: F.layer_norm(x, (64,)), torch.randn(24, 64))
    assert next(find_rooms(norm)).trace.shapes == (("M", 64),)
    named = next(find_rooms(norm, {("x", 0): "tokens"}))
    assert named.trace.dims == {"tokens": 24}
    with pytest.raises(AuthoringError, match="takes no other sizes"):
        next(find_rooms(make_operation(lambda x: x.view(4, 8), torch.randn(4, 8)), {("x", 0): "B"}))


def test_tensors_stay_within_32_bit_indices_where_the_examples_are():
    """A hidden case of KernelBench's 52_Argmin had 2³¹ elements more than the example: an H200
    reported an illegal address.
    """
    room = next(find_rooms(make_operation(lambda x: x.argmin(1), torch.randn(8, 16, 15))))
    assert cases._constraints(room) == ()

    def of(*sizes):
        dims = dict(zip(room.trace.dims, sizes, strict=True))
        return cases._constraints(replace(room, trace=replace(room.trace, dims=dims)))

    assert of(128, 4096, 4095) == ("B * M * N < 2 ** 31",)
    assert of(129, 4096, 4096) == ()  # the example has more itself
    draft = make_draft(room).with_(constraints=of(128, 4096, 4095))
    assert 'constraints = ["B * M * N < 2 ** 31"]' in task_toml(draft).splitlines()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize(("layer", "name"), [(nn.GRU, "gru"), (nn.LSTM, "lstm")])
def test_a_recurrent_layer_is_one_operation_of_any_number_of_steps(layer, name, batch_first):
    torch.manual_seed(0)
    module = layer(8, 16, num_layers=2, bidirectional=True, batch_first=batch_first)
    room = next(find_rooms(make_operation(module, torch.randn(12, 10, 8))))
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


@pytest.mark.parametrize(
    "layer", [nn.GRU(8, 16), nn.LSTM(8, 16, 2, bias=False), nn.LSTM(8, 16, proj_size=9)]
)
def test_the_weights_of_a_small_recurrent_layer_have_sizes_that_go_together(layer):
    found = next(find_rooms(make_operation(layer, torch.randn(12, 10, 8)))).trace
    assert found.dims == {"B": 12, "M": 10}

    def gru(x, h, *weights):
        return torch.gru(x, h, weights, False, 1, 0.0, False, False, False)

    inputs = torch.randn(12, 10, 8), torch.randn(1, 10, 16), torch.randn(48, 8), torch.randn(48, 16)
    shapes = next(find_rooms(make_operation(gru, inputs))).trace.shapes
    assert shapes[2:] == (("3 * N", "K"), ("3 * N", "N"))


def test_tensors_of_a_list_have_equal_dimensions_where_their_shapes_are_equal():
    def stacked(x, caches):
        return [x + c.sum(0) for c in caches]

    caches = [torch.randn(40, 16), torch.randn(40, 16), torch.randn(24, 16)]
    found = next(find_rooms(make_operation(stacked, (torch.randn(16), caches)))).trace
    assert found.shapes == (("N",), ("M", "N"), ("M", "N"), ("K", "N"))


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


@pytest.mark.nightly
def test_cases_of_many_weights_have_more_than_one_of_all_else():
    draft = make_draft(next(find_rooms(make_operation(Wide(), torch.randn(64, 32, 512)))))
    for kind in (draft.cpu, draft.gpu):
        assert max(min(c.sizes.values()) for c in kind.check) > 1
    assert min(draft.cpu.bench[0].sizes.values()) > 1


@pytest.mark.nightly
@pytest.mark.parametrize(("most_s", "own"), [(1e9, True), (0.0, False)])
def test_the_examples_own_sizes_are_a_benchmark_case_where_time_allows(monkeypatch, most_s, own):
    monkeypatch.setattr(cases, "BENCH_S", 0.0)  # so that the case is scaled down
    monkeypatch.setattr(cases, "MOST_BENCH_S", most_s)
    draft = make_draft(
        next(find_rooms(make_operation(lambda x: x.cumsum(1), torch.rand(8192, 512))))
    )
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


@pytest.mark.nightly
def test_sizes_that_only_real_tensors_compare_are_one_dimension():
    """The gradient of a layer norm: on tensors without memory torch takes weights of any length."""
    wide = [torch.randn(4, 16, 64) for _ in range(3)]
    of_rows, of_columns = [torch.rand(4, 16, 1) for _ in range(2)], [torch.rand(64)] * 2
    inputs = (*wide[:2], *of_rows, *of_columns, wide[2])
    room = next(find_rooms(make_operation(norm_backward, inputs)))
    weight, bias = room.trace.shapes[4:6]
    assert weight == bias == room.trace.shapes[0][-1:]
    assert len(room.trace.dims) == 2
    assert room.trace.dims[weight[0]] == 64
    assert room.trace.works({n: 2 * s for n, s in room.trace.dims.items()})


def test_equal_sizes_that_nothing_ties_stay_apart():
    room = next(find_rooms(make_operation(lambda x, y: x.relu() @ y, (torch.rand(32, 32),) * 2)))
    assert len(room.trace.dims) == 3


@pytest.mark.nightly
def test_hidden_cases_of_all_costs_are_drawn_from_the_least():
    def layers(x, a, b, c):
        return F.relu(F.relu(x @ a) @ b) @ c

    sizes = [(64, 512), (512, 1024), (1024, 2048), (2048, 512)]
    given = tuple(torch.randn(s) / s[0] ** 0.5 for s in sizes)
    draft = make_draft(next(find_rooms(make_operation(layers, given))))
    small, usual, padded = draft.gpu.hidden_check
    assert 1 < small.least < 1e4 < small.most == usual.least < usual.most == padded.least
    assert small.count == len(small.dims) == 5


def partly_rotated(x, cos, sin):
    rotated, rest = x.tensor_split([2 * cos.shape[-1]], -1)
    one, two = rotated.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], -1)


def halves_and_rest(x, a, b):
    return x[..., : a.shape[-1] + b.shape[-1]] * torch.cat([a, b], -1)


@pytest.mark.parametrize(
    ("function", "sizes"),
    [
        (partly_rotated, [(2, 8, 32, 64), (32, 16), (32, 16)]),
        (halves_and_rest, [(64,), (24,), (24,)]),
    ],
)
def test_a_dimension_that_bounds_others_does_so_in_all_hidden_cases(function, sizes):
    """Hidden sizes of a partial rotary embedding had more to rotate than there was."""
    room = next(find_rooms(make_operation(function, tuple(torch.randn(s) for s in sizes))))
    draft = make_draft(room)
    for kind in (draft.cpu, draft.gpu):
        for generator in (*kind.hidden_check, *kind.hidden_bench):
            dims = {n: tomllib.loads(f"ends = {v}")["ends"] for n, v in generator.dims.items()}
            ends = [d if isinstance(d, list) else [d["min"], d["max"]] for d in dims.values()]
            assert sum(len(each) > 1 for each in ends) >= len(ends) - 1
            for corner in itertools.product(*ends):
                assert room.trace.fits(dict(zip(dims, corner, strict=True))), (corner, dims)


def test_a_size_that_is_fixed_beside_others_may_vary_alone():
    def causal(x, weight):
        padded = F.pad(x, (3, 0))
        return F.silu(F.conv1d(padded, weight.unsqueeze(1), groups=x.shape[1]))

    room = next(find_rooms(make_operation(causal, (torch.randn(2, 16, 32), torch.randn(16, 4)))))
    assert room.trace.dims == {"C": 16, "L": 32}  # equal channels are one dimension
    fixed = next(find_rooms(make_operation(lambda x: x.view(4, 8), torch.randn(4, 8))))
    assert fixed.trace.dims == {}


def test_a_dimension_that_others_must_have_too_names_them():
    def masked(scores, mask):
        return scores.masked_fill(mask, -1.0).softmax(-1)

    operation = make_operation(masked, (torch.randn(3, 64, 48), torch.ones(64, 48) > 0))
    with pytest.raises(AuthoringError, match=r"^S: .* size: mask:0\. .* --vary mask:0=S$"):
        next(find_rooms(operation, {("scores", 1): "S"}))
    room = next(find_rooms(operation, {("scores", 1): "S", ("mask", 0): "S"}))
    assert room.trace.dims == {"S": 64}


def moving_average(x):
    state, found = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = 0.9 * state + x[:, t]
        found.append(state)
    return torch.stack(found, 1)


def test_a_dimension_that_a_loop_runs_over_is_told_so():
    operation = make_operation(moving_average, torch.randn(8, 12, 64))
    with pytest.raises(AuthoringError, match=r"^T: .* Python number, as a loop over it does"):
        next(find_rooms(operation, {("x", 1): "T"}))


def embedded_bags(indices, offsets, table):
    return F.embedding_bag(indices, table, offsets, mode="sum")


def segment_ids(offsets, elements):
    counts = offsets.diff()
    places = torch.arange(offsets.numel() - 1)
    return torch.repeat_interleave(places, counts, output_size=elements)


def sums_of_segments(x, offsets):
    out = torch.zeros(offsets.numel() - 1, dtype=x.dtype)
    return out.index_add_(0, segment_ids(offsets, x.numel()), x)


def ragged():
    lengths = torch.randint(1, 40, (32,))
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return torch.randn(int(ends[-1])), ends


def ragged_with_empty_parts():
    lengths = torch.randint(1, 40, (32,))
    lengths[::5] = 0
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return torch.randn(int(ends[-1])), ends


def ignored_by_index():
    labels = torch.randint(0, 300, (256,))
    labels[torch.rand(256) < 0.15] = -100
    return torch.randn(256, 300), labels


def ignored_by_where():
    labels = torch.randint(0, 300, (256,))
    return torch.randn(256, 300), torch.where(torch.rand(256) < 0.15, -100, labels)


def ignored_in_steps():
    labels = torch.randint(0, 300, (256,))
    labels[::7] = -100
    return torch.randn(256, 300), labels


def write_slots(cache, new, slots):
    cache[slots] = new


def masked_sum(x, lengths):
    mask = torch.arange(x.shape[1]) < lengths[:, None]
    return x.masked_fill(~mask, 0).sum(-1)


def segments_of_64(x, segment):
    return torch.zeros(64, x.shape[1]).index_add_(0, segment, x)


def scaled_codes(codes, zeros, x):
    return (codes.to(x.dtype) - zeros) * x


def codes_of_8_bits():
    zeros = torch.randint(0, 16, (256, 16)).float()
    return torch.randint(0, 256, (256, 16), dtype=torch.uint8), zeros, torch.randn(256, 16)


def of_a_kind(x, table, kinds):
    return x + table[kinds]


@pytest.mark.parametrize(
    ("function", "inputs", "dims", "lines"),
    [
        (
            scaled_codes,  # bounds that equal a dimension by chance
            codes_of_8_bits,
            2,
            ["torch.randint(0, 256, (M, N)", "torch.randint(0, 16, [M, N]"],
        ),
        (
            lambda table, ids: table[ids] * 2,  # values, of which the least is large by chance
            lambda: (torch.randn(1000, 16), torch.tensor([37, 940, 512, 77, 250, 999, 601, 420])),
            3,
            ["torch.randint(0, M, (K,)"],
        ),
        (F.cross_entropy, ignored_by_index, 2, ["torch.randint(0, N, [M]"]),
        (F.cross_entropy, ignored_by_where, 2, ["torch.randint(0, N, [M]"]),
        (F.cross_entropy, ignored_in_steps, 2, ["torch.randint(0, N, [M]", "fill_", "(-100"]),
        (
            embedded_bags,
            lambda: (torch.randint(0, 500, (640,)), torch.arange(0, 640, 20), torch.randn(500, 16)),
            4,
            ["torch.randint(0, M, (N,)", "torch.arange(K, device=device) * (N) // (K)"],
        ),
        (sums_of_segments, ragged, 2, ["(_at * (N - (K) + 2)).long()", "value=N)"]),
        (sums_of_segments, ragged_with_empty_parts, 2, ["(_at * (N + 1)).long()", "value=N)"]),
        (
            sums_of_segments,
            lambda: (torch.randn(1280), torch.arange(0, 1281, 20)),
            2,
            ["torch.arange(K, device=device) * (N) // max(1, K - 1)"],
        ),
        (
            write_slots,
            lambda: (torch.randn(512, 8), torch.randn(96, 8), torch.randperm(512)[:96]),
            3,
            ["torch.randperm(M, generator=generator, device=device)[: K]"],
        ),
        (
            write_slots,  # so few of so many could be distinct by chance
            lambda: (torch.zeros(1024, 8), torch.randn(16, 8), torch.randperm(1024)[:16]),
            3,
            ["torch.randperm(M, generator=generator, device=device)[: K]"],
        ),
        (
            masked_sum,
            lambda: (torch.randn(64, 96), torch.randint(1, 97, (64,))),
            2,
            ["torch.randint(1, N + 1, (M,)"],
        ),
        (
            segments_of_64,
            lambda: (torch.randn(256, 64), torch.randint(0, 64, (256,))),
            2,
            ["torch.randint(0, 64, (M,)"],
        ),
        (
            of_a_kind,  # all of one, in the example
            lambda: (torch.randn(512, 64), torch.randn(2, 64), torch.zeros(512).long()),
            2,
            ["torch.randint(0, 2, (M,)"],
        ),
    ],
)
@pytest.mark.sampled(one_in=3)
def test_numbers_that_point_into_a_dimension_do_so_at_all_sizes(function, inputs, dims, lines):
    torch.manual_seed(0)
    operation = make_operation(function, inputs)
    room, draft = new_task._tried_rooms(find_rooms(operation, None), lambda _: None)
    assert len(room.trace.dims) == dims
    text = reference_py(draft)
    assert [line for line in lines if line not in text] == []
    for case in draft.cpu.check:
        assert all(evaluate(c, case.sizes) for c in draft.constraints)
    assert all(evaluate(c, room.trace.dims) for c in draft.constraints)


class Rotated(nn.Module):
    """Has a cosine for each position of a sequence, and space for more of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", torch.randn(512, 16))

    def forward(self, q, positions):
        return q * self.cos[positions].unsqueeze(1)


@pytest.mark.parametrize(
    ("positions", "constraint"),
    [
        (lambda: torch.arange(96).expand(2, 96).contiguous(), "H <= M"),
        (lambda: (torch.arange(96) + 7)[None].int().repeat(2, 1), "H <= M"),
    ],
    ids=["from 0", "from 7"],
)
def test_positions_are_no_more_than_the_table_that_they_point_into_has(positions, constraint):
    """Hidden cases of positions beyond it ended `kagent new` with the task's own IndexError. They
    begin anywhere in each row, and have a gap: a kernel that counts by itself, or from the first of
    them, passed every case.
    """
    operation = make_operation(Rotated, lambda: (torch.randn(2, 3, 96, 16), positions()))
    room, draft = new_task._tried_rooms(find_rooms(operation, None), lambda _: None)
    assert room.trace.dims == {"H": 96, "W": 16, "M": 512}
    assert draft.constraints == (constraint,)
    for case in (*draft.cpu.check, *draft.cpu.bench, *draft.gpu.check):
        assert evaluate(constraint, case.sizes)
    case = Case(name="c", dtype="float32", inputs="normal", scale=1.0, **room.trace.dims)
    space = {}
    exec(reference_py(draft), space)
    drawn = [
        space["inputs"](case, torch.Generator().manual_seed(seed), "cpu")["positions"]
        for seed in range(8)
    ]
    assert len({int(p[0, 0]) for p in drawn}) > 1
    assert all(bool((p[0] != p[1]).any()) for p in drawn)
    assert max(int(p.diff().max()) for p in drawn) > 1
    for p in drawn:
        assert 0 <= p.min() <= p.max() < 512
        assert p.diff().min() == 1
        assert int((p.diff() > 1).sum()) <= 2  # one in each row


def picked_losses(a, b, labels):
    return F.cross_entropy(a @ b.T, labels, reduction="none")


def turned(q, positions):
    angles = positions[:, None] * torch.tensor([1.0, 0.1])
    return torch.cat([q * angles.cos(), q * angles.sin()], -1)


def test_places_of_which_there_are_no_more_go_around():
    x, i = torch.randn(64, 16), torch.arange(64)
    operation = make_operation(lambda x, i: x[i] + x, lambda: (x, i))
    room, draft = new_task._tried_rooms(find_rooms(operation, None), lambda _: None)
    case = Case(name="c", dtype="float32", inputs="normal", scale=1.0, **room.trace.dims)
    space = {}
    exec(reference_py(draft), space)
    drawn = space["inputs"](case, torch.Generator().manual_seed(1), "cpu")["i"]
    assert torch.equal(drawn.sort().values, i)
    assert not torch.equal(drawn, i)


@pytest.mark.parametrize(
    ("function", "inputs", "drawn"),
    [
        (
            picked_losses,
            lambda: (torch.randn(64, 32), torch.randn(64, 32), torch.arange(64)),
            "torch.randint(N - M + 1, (2, 1)",  # of classes
        ),
        (turned, lambda: (torch.randn(64, 2), torch.arange(64)), "torch.randint(M + 1, (2, 1)"),
    ],
)
def test_numbers_that_follow_each_other_are_never_the_same_ones(function, inputs, drawn):
    """Labels of pairs, and positions that angles are made of, were always 0, 1, 2 ..."""
    _, draft = new_task._tried_rooms(
        find_rooms(make_operation(function, inputs), None), lambda _: None
    )
    assert drawn in reference_py(draft)


def test_a_size_that_must_be_even_is_a_constraint():
    """An exported operator gave a kernel's results of odd sizes, where torch refuses them."""
    x = torch.randn(8, 64)
    room, draft = new_task._tried_rooms(
        find_rooms(make_operation(lambda x: torch.mul(*x.chunk(2, -1)), x), None), lambda _: None
    )
    assert room.steps["N"] == 2
    assert draft.constraints == ("N % 2 == 0",)


def updated(keys, values, k, v, positions):
    keys.index_copy_(1, positions, k)
    values[:, positions] = v


def test_positions_of_a_cache_that_is_written_begin_anywhere_in_it():
    """All sizes but one were left as in the example, or none could be computed."""

    def inputs():
        caches = (torch.zeros(2, 64, 16), torch.zeros(2, 64, 16))
        return *caches, torch.randn(2, 8, 16), torch.randn(2, 8, 16), torch.arange(8) + 20

    room, draft = new_task._tried_rooms(
        find_rooms(make_operation(updated, inputs), None), lambda _: None
    )
    assert len(room.trace.dims) == 5
    assert "torch.randint(min(M, K) - Q + 1, (2, 1)" in reference_py(draft)
    assert draft.constraints == ("Q <= M", "Q <= K")


def summed_at_places(x, grid):
    places = (x[:, 0].clamp(0, 0.999) * 16).long()
    return torch.zeros_like(grid).index_add(0, places, x)


def embedded_quantiles(x, bounds, table):
    return table[torch.searchsorted(bounds, x)]


@pytest.mark.parametrize(
    ("function", "inputs", "dims"),
    [
        (
            summed_at_places,  # hidden cases have 16 places or more
            (torch.rand(256, 24), torch.rand(16, 24)),
            {"M": 256, "N": 24, "K": 16},
        ),
        (
            embedded_quantiles,
            (torch.randn(64, 128), torch.linspace(-2, 2, 63), torch.randn(64, 16)),
            {"M": 64, "N": 128, "K": 16},
        ),
    ],
)
def test_a_dimension_that_computed_places_point_into_stays_as_in_the_example(
    function, inputs, dims
):
    """A first hidden case of fewer places ended `kagent new` with the task's own IndexError."""
    room, draft = new_task._tried_rooms(
        find_rooms(make_operation(function, inputs), None), lambda _: None
    )
    assert room.trace.dims == dims
    assert len(draft.cpu.check) > 8
    sizes = {n: tomllib.loads(f"x = {v}")["x"] for n, v in draft.cpu.hidden_check[0].dims.items()}
    assert function is not summed_at_places or sizes["K"]["min"] == 16


def preference_loss(chosen, reference, labels, mask):
    def logp(logits):
        each = logits.log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
        return (each * mask).sum(-1)

    one, two = (logp(chosen) - logp(reference)).chunk(2)
    return -F.logsigmoid(0.1 * (one - two)).mean()


def test_equal_sizes_of_which_one_may_not_be_larger_are_one_dimension():
    """`gather` takes fewer places than its input has: each size alone was fixed by another."""
    logits, labels = torch.randn(8, 16, 100), torch.randint(0, 100, (8, 16))
    operation = make_operation(preference_loss, (logits, logits, labels, torch.rand(8, 16)))
    room = next(find_rooms(operation))
    assert sorted(room.trace.dims.values()) == [8, 16, 100, 100]
    with pytest.raises(AuthoringError, match="takes no other sizes there, or ties it"):
        next(find_rooms(operation, {("labels", 0): "B"}))


@pytest.mark.nightly
def test_sizes_that_the_same_numbers_point_into_are_one_dimension():
    logits, labels = torch.randn(8, 16, 100), torch.randint(0, 100, (8, 16))
    operation = make_operation(preference_loss, (logits, logits, labels, torch.rand(8, 16)))
    room, _ = new_task._tried_rooms(find_rooms(operation), lambda _: None)
    assert sorted(room.trace.dims.values()) == [8, 16, 100]


@pytest.mark.parametrize(
    ("factor", "size"),
    [(0.5, "W // 2"), (2.0, "2 * W"), (1.5, "(3 * W) // 2"), ((1.0, 0.25), "W // 4")],
)
def test_sizes_of_what_is_scaled_are_formulas(factor, size):
    """They were truncated products of floating-point numbers, and all sizes stayed."""

    def scaled(x):
        return F.interpolate(x, scale_factor=factor, mode="bilinear")

    room = next(find_rooms(make_operation(scaled, torch.randn(2, 3, 24, 40))))
    assert room.trace.dims == {"H": 24, "W": 40}
    assert room.trace.results[0].shape[3] == size


def test_a_dimension_in_which_no_case_can_be_computed_stays_as_in_the_example():
    """Places that only the example's own values point to."""
    places = torch.tensor([3, 700, 7, 11, 13, 17, 19, 700, 29, 31])
    operation = make_operation(lambda x, i: x[i * 1], (torch.randn(1024, 16), places))
    room, _ = new_task._tried_rooms(find_rooms(operation, None), lambda _: None)
    assert 1024 not in room.trace.dims.values()
    with pytest.raises(AuthoringError, match=r"out of .*: --vary ARG:DIM=NAME \(x:0=B\)$"):
        make_draft(next(find_rooms(operation, {("x", 0): "B"})))


def test_heads_that_share_keys_have_as_many_keys_as_values():
    def attention(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    found = traced(attention, *(torch.randn(1, h, 24, 16) for h in (8, 2, 2)))
    assert found.shapes[1] == found.shapes[2]
    assert found.work(found.dims) == 4 * 8 * 24 * 24 * 16


def test_vectors_of_one_row_have_no_case_of_rows_of_all_kinds():
    operation = make_operation(torch.outer, (torch.rand(32), torch.rand(16)))
    draft = make_draft(next(find_rooms(operation)))
    every = (*draft.cpu.check, *draft.gpu.check)
    assert all(max(c.sizes.values()) > 64 for c in every if c.inputs == "mixed")


@pytest.mark.parametrize("recorded", [True, False])
def test_few_numbers_from_0_to_a_size_are_offsets(recorded):
    def example():
        return torch.randn(128), torch.tensor([0, 17, 47, 52, 92, 128])

    operation = make_operation(sums_of_segments, example if recorded else example())
    draft = bare(next(find_rooms(operation)).trace)
    offsets = draft.trace.operation.examples if recorded else with_offsets(draft)
    assert "parts of any length begin, from 0 to 128" in offsets[1].drawing.words()


LENGTHS = """\
import torch


def half(x, y):
    n = len(x)
    return x / n + y


def even(x, y):
    return x * 2 if x.shape[0] % 2 == 0 else y
"""


@pytest.mark.parametrize(
    ("name", "rows", "notes"),
    [
        (
            "half",
            96,
            "x.shape[0] stays 96: line 5 of lengths.py (`n = len(x)`) takes it for a number",
        ),
        ("even", "M", ""),  # a condition
    ],
)
def test_what_fixes_a_size_is_said_with_its_line(name, rows, notes, tmp_path):
    (tmp_path / "lengths.py").write_text(LENGTHS)
    function = getattr(load_module(tmp_path / "lengths.py"), name)
    found = traced(function, torch.randn(96, 512), torch.randn(96, 512))
    assert found.shapes[0][0] == rows
    assert ", ".join(found.notes) == notes


@pytest.mark.parametrize(("arguments", "least"), [(ragged, 1), (ragged_with_empty_parts, 0)])
def test_parts_are_also_of_very_different_lengths(arguments, least):
    """As one long bag beside many that are short, or empty."""
    operation = make_operation(sums_of_segments, arguments)
    _, draft = new_task._tried_rooms(find_rooms(operation, None), lambda _: None)
    space, longest = {}, []
    exec(reference_py(draft), space)
    given = Case(name="c", dtype="float32", **draft.cpu.check[0].sizes)
    for seed in range(20):
        drawn = space["inputs"](given, torch.Generator().manual_seed(seed), torch.device("cpu"))
        places = drawn["offsets"]
        assert (places[0], places[-1]) == (0, len(drawn["x"]))
        assert places.diff().amin() >= least
        longest.append(float(places.diff().amax() / places[-1]))
    assert max(longest) > 0.5
    assert min(longest) < 0.3
