"""Parts of an index are joined as torch joins them."""

import pytest
import sympy
from kagent.authoring.inductor.join_dimensions import join_dimensions
from torch._inductor import sizevars
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

X, J, S, T = sympy.symbols("i j s t", integer=True, positive=True)


@pytest.mark.parametrize(
    ("index", "joined"),
    [
        (
            ModularIndexing(X, 1, 32) + 32 * ModularIndexing(X, 32, 4),
            ModularIndexing(X, 1, 128),
        ),
        (ModularIndexing(X, 1, 32) + 32 * FloorDiv(X, 32), X),
        (
            J + 5 * ModularIndexing(X, 2, S) + 5 * S * ModularIndexing(X, 2 * S, T),
            J + 5 * ModularIndexing(X, 2, S * T),
        ),
        (
            ModularIndexing(X, 1, 4) + 4 * ModularIndexing(X, 4, 8) + 32 * FloorDiv(X, 32) + J,
            X + J,
        ),
        (ModularIndexing(X, 1, 32) + 32 * ModularIndexing(J, 32, 4), None),
        (ModularIndexing(X, 1, 32) + 16 * FloorDiv(X, 32), None),
        (X + J, None),
        (ModularIndexing(X, 1, 32), None),
    ],
)
def test_parts_are_joined_as_torch_does(index, joined):
    assert join_dimensions(index) == (index if joined is None else joined)
    assert sizevars.join_dimensions(index) == join_dimensions(index)
