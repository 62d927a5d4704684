"""Mistakes that people and models make in kernels: some draw of a task's cases shows each."""

import math

import pytest
import torch
from kagent.authoring.draft.cases import make_draft
from kagent.authoring.draft.draft import WIDE
from kagent.authoring.draft.reference import reference_py
from kagent.authoring.draft.rooms import find_rooms
from kagent.authoring.tracing.operation import make_operation
from kagent_sandbox.data.case import Case

DRAWS = 6


def tiled_softmax(x, tile=16):
    """NaN where the first tile is masked throughout: exp(-inf - -inf)."""
    most = torch.full_like(x[..., :1], -math.inf)
    total = torch.zeros_like(most)
    for part in x.split(tile, -1):
        new = torch.maximum(most, part.amax(-1, keepdim=True))
        total = total * (most - new).exp() + (part - new).exp().sum(-1, keepdim=True)
        most = new
    return (x - most).exp() / total


def masked(q, mask):
    return torch.softmax((q @ q.mT).masked_fill(~mask, -math.inf), -1)


def masked_by_tiles(q, mask):
    found = tiled_softmax((q @ q.mT).masked_fill(~mask, -math.inf))
    return torch.where(mask.any(-1, keepdim=True), found, math.nan)


def product_gradient(grad, x):
    return torch.where(x == 0, 0.0, grad[:, None] * x.prod(1, keepdim=True) / x)


def true_product_gradient(grad, x):
    ones = torch.ones_like(x[:, :1])
    before = torch.cat([ones, x[:, :-1].cumprod(1)], 1)
    behind = torch.cat([ones, x.flip(1)[:, :-1].cumprod(1)], 1).flip(1)
    return grad[:, None] * before * behind


GIVEN = [
    ("a tile", lambda x: x.softmax(-1), tiled_softmax, lambda: (torch.randn(64, 256),)),
    (
        "a padded tile",
        masked,
        masked_by_tiles,
        lambda: (torch.randn(4, 64, 16), torch.rand(4, 64, 64) < 0.7),
    ),
    (
        "int32",
        lambda x: x.sum(1),
        lambda x: x.sum(1, dtype=torch.int32).long(),
        lambda: (torch.randint(100, (64, 256), dtype=torch.int32),),
    ),
    (
        "a product of 32 bits",
        lambda a, b: a * b,
        lambda a, b: (a.int() * b.int()).long(),
        lambda: (torch.randint(1000, (64, 96)), torch.randint(1000, (64, 96))),
    ),
    (
        "C's quotient",
        lambda x: x // 7,
        lambda x: torch.div(x, 7, rounding_mode="trunc"),
        lambda: (torch.randint(1000, (64, 96)),),
    ),
    (
        "a maximum from 0",
        lambda x: x.amax(1),
        lambda x: x.amax(1).clamp(min=0),
        lambda: (torch.rand(64, 96),),
    ),
    (
        "a softmax's maximum from 0",
        lambda x: x.softmax(-1),
        lambda x: (
            (x - x.amax(-1, keepdim=True).clamp(min=0)).exp()
            / (x - x.amax(-1, keepdim=True).clamp(min=0)).exp().sum(-1, keepdim=True)
        ),
        lambda: (torch.randn(64, 96),),
    ),
    (
        "a gain behind a maximum",
        lambda x, g: (x * g).amax(1),
        lambda x, g: x.amax(1) * g,
        lambda: (torch.randn(4, 64, 48), torch.ones(48)),
    ),
    (
        "a quotient by 0",
        true_product_gradient,
        product_gradient,
        lambda: (torch.randn(64), torch.randn(64, 6)),
    ),
    ("any", lambda x: x.all(1), lambda x: x.any(1), lambda: (torch.randn(64, 96),)),
]


@pytest.mark.parametrize(
    ("function", "wrong", "example"), [g[1:] for g in GIVEN], ids=[g[0] for g in GIVEN]
)
@pytest.mark.sampled(one_in=3)
def test_some_draw_shows_it(function, wrong, example):
    draft = make_draft(next(find_rooms(make_operation(function, example()))))
    space = {}
    exec(reference_py(draft), space)
    names = [e.name for e in draft.trace.operation.examples]
    for case in draft.cpu.check:
        given = Case(name="c", dtype=case.dtype, inputs=case.inputs, scale=case.scale, **case.sizes)
        for seed in range(DRAWS):
            drawn = space["inputs"](given, torch.Generator().manual_seed(seed), torch.device("cpu"))
            right, mine = (f(*(drawn[n] for n in names)) for f in (function, wrong))
            if not torch.allclose(right.double(), mine.double(), 1e-3, 1e-3, equal_nan=True):
                return
    pytest.fail("nothing shows it")


def test_places_and_counts_are_not_of_any_magnitude():
    table, places = torch.randn(64, 8), torch.randint(64, (96,))
    draft = make_draft(next(find_rooms(make_operation(lambda t, p: t[p], (table, places)))))
    assert draft.wide == ()
    assert WIDE not in {c.inputs for c in draft.cpu.check}
    shifted = make_operation(
        lambda x, n: x << n, (torch.randint(99, (64, 8)), torch.randint(9, (64, 8)))
    )
    assert make_draft(next(find_rooms(shifted))).wide == ()
