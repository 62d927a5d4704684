"""Rules for results of which torch fixes only some, in tasks made of PyTorch code."""

import pytest
import torch
from kagent.authoring.draft.draft import DraftKind, TaskDraft
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.draft.toml import task_toml
from traced_functions import traced


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
